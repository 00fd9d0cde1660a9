"""Import a published KERPLE or GPT-NeoX checkpoint into this project's layout.

    python tools/import_kerple.py SRC DST [--config FILE.yml ...]

SRC is a folder unzipped from a KERPLE or GPT-NeoX release. SRC contains the file `latest` and the
folder `global_stepN/`, or is itself a `global_stepN` folder. DST becomes a run folder. To use DST,
set `load` in a config, or pass DST to evaluate.py as `--load`. Both also accept SRC itself, but
then the tensor-parallel shards are merged each time. The import merges the shards once, and checks
that nothing is missing.

The import reads the weights, the step and the learning-rate schedule. It does not read the
optimizer's state. Files whose pickled data would run code are refused.
"""

from pathlib import Path

from megatron import entry
from megatron.config.reader import read_file
from megatron.engine.checkpoint.exchange import import_checkpoint
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.run_folder import is_published


@entry.reports
def main() -> int:
    """Import the checkpoint. Return exit code 0, or print an error and return 1."""
    parser = entry.parser(__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    config_help = "what it was trained with (default: the files stored in it)"
    parser.add_argument("--config", type=Path, nargs="*", help=config_help)
    args = parser.parse_args()
    if not args.source.is_dir():
        parser.error(f"{args.source}: no such folder; name that of an unzipped release")
    source = _checkpoint_in(args.source)
    stored = sorted(path for path in (source / "configs").glob("*.yml") if path.is_file())
    files = stored if args.config is None else args.config
    summed = bool(_last_value("gpt_j_residual", files)) if files else None
    found = import_checkpoint(source, args.target, summed_biases=summed)
    count = sum(tensor.numel() for tensor in found.weights.values())
    parts = found.shape.parts
    if not files:
        without = "taken as trained without gpt_j_residual"
        text = without if parts > 1 else "an export to several ranks needs an import with --config"
        found.notes.append(f"no config was found: {text}")
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{source} -> {args.target}: step {found.step}, {found.shape.num_layers} layers, "
        f"{count:,} parameters, {parts} tensor-parallel rank{'s' if parts > 1 else ''}"
    )
    return 0


def _checkpoint_in(folder: Path) -> Path:
    """Return the folder of the published checkpoint: `folder`, or the newest checkpoint in it.

    Raises:
        CheckpointError: There is no published checkpoint in `folder`.
    """
    if is_published(folder):
        return folder
    saved = newest(folder)
    if saved is None or saved.kind != "published":
        raise CheckpointError(
            f"{folder} holds no published checkpoint: no `latest` that names a folder with files "
            "layer_00-model_00-model_states.pt, ..., or mp_rank_00_model_states.pt"
        )
    return saved.path


def _last_value(key: str, files: list[Path]) -> object:
    """Return the value of `key` in the last YAML file that contains `key`.

    If no file contains `key`, return None.
    """
    # If several files contain `key`, the last one determines the value. The files may write `-`
    # instead of `_` in keys.
    value = None
    for file in files:
        settings, problems = read_file(file)
        if problems:
            raise CheckpointError("\n".join(map(str, problems)))
        value = settings[(key,)].value if (key,) in settings else value
    return value


if __name__ == "__main__":
    entry.run(main)
