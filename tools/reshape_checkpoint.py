"""Convert a checkpoint of any parallel layout into DeepSpeed's universal checkpoint format.

    python tools/reshape_checkpoint.py RUN OUT [--tag global_stepN] [--workers 4]

The tool converts the newest checkpoint of RUN, or the checkpoint that --tag names. It writes each
parameter and its optimizer state unsharded to
OUT/global_stepN/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt.

Training does not need this tool, because train.py converts checkpoints by itself. Use the tool to
convert a checkpoint on another machine, or to read the optimizer state.
"""

from pathlib import Path

from megatron import entry

# isort: split
import torch

from megatron.engine.checkpoint import relayout
from megatron.engine.checkpoint.publish import new_folder
from megatron.engine.checkpoint.saved_checkpoints import Saved, require_newest
from megatron.engine.errors import CheckpointError
from megatron.parallel.groups import build_groups


def reshape(run: Path, out: Path, tag: str | None, workers: int) -> Path:
    """Convert a checkpoint to the universal format, and return the folder that was written.

    Args:
        run: The run folder that contains the checkpoints.
        out: The folder in which to create the converted checkpoint.
        tag: The name of the checkpoint to convert, such as `global_step1000`; None means the
            newest.
        workers: The number of processes.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged, or cannot be converted, or the
            output folder exists already.
    """
    saved = Saved(run, tag) if tag else require_newest(run)
    if not saved.path.is_dir():
        raise CheckpointError(f"{run} holds no checkpoint {tag}")
    saved.require_intact(build_groups(torch.device("cpu")))
    if saved.kind != "ours":
        raise CheckpointError(f"{saved.path} cannot be converted: it holds no optimizer state")
    layout = saved.record.layout
    why = relayout.why_not_resumed(layout, layout | {"model_parallel_size": 1})  # written unsharded
    if why:
        raise CheckpointError(f"{saved.path} cannot be converted: {why}")
    final = out / saved.tag
    if final.exists():
        raise CheckpointError(f"{final} exists already; name another folder")
    with new_folder(final) as folder:
        relayout.convert(saved, folder.parent, workers=workers)
    return final


@entry.reports
def main() -> int:
    """Convert the checkpoint that the command line names, and return exit code 0.

    For an error that the user can correct, print the error and return exit code 1.
    """
    parser = entry.parser(__doc__)
    parser.add_argument("run", type=Path, help="folder with `latest` and global_step folders")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--tag", help="checkpoint to convert (default: the newest)")
    parser.add_argument("--workers", type=entry.number(int, 1), default=1, help="processes")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run}: no such folder; name the `save` folder of a run")
    print(f"written to {reshape(args.run, args.out, args.tag, args.workers)}")
    return 0


if __name__ == "__main__":
    entry.run(main)
