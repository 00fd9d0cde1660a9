"""Write a checkpoint of this project in the published (GPT-NeoX pipeline) layout.

    python tools/export_neox.py SRC DST [--tp N]

SRC is a run folder, whose newest checkpoint is exported. The tool writes `latest` and
`global_stepN/` into DST, with `layer_XX-model_YY-model_states.pt` and `mp_rank_YY_model_states.pt`.
An imported checkpoint is exported to the files that it was imported from, tensor for tensor. The
files hold no optimizer state: set `no_load_optim: true` in the published program. If N differs from
the number of ranks that trained it, set `make_vocab_size_divisible_by` there too, to the padded
vocabulary divided by N: that program compares them.
"""

from __future__ import annotations

from pathlib import Path

from megatron import entry
from megatron.config import ConfigError
from megatron.engine.checkpoint.exchange import export_checkpoint
from megatron.engine.errors import CheckpointError


@entry.reports(CheckpointError, ConfigError)
def main() -> int:
    """Exit code 0, or 1 if it cannot be exported."""
    parser = entry.parser(__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parts_help = "tensor-parallel ranks (default: as many as it was trained with)"
    parser.add_argument("--tp", type=int, metavar="N", help=parts_help)
    args = parser.parse_args()
    if args.tp is not None and args.tp < 1:
        parser.error(f"--tp must be at least 1, not {args.tp}")
    if not args.source.is_dir():
        parser.error(f"{args.source}: no such folder; name the `save` folder of a run")
    written = export_checkpoint(args.source, args.target, parts=args.tp)
    print(f"{args.source} -> {written}: {len(list(written.glob('*.pt')))} files")
    return 0


if __name__ == "__main__":
    entry.run(main)
