"""A checkpoint of this project in the published (GPT-NeoX pipeline) layout.

    python tools/export_neox.py SRC DST [--tp N]

SRC is a run folder (its newest checkpoint is taken); DST gets `latest` and `global_stepN/` with
`layer_XX-model_YY-model_states.pt` and `mp_rank_YY_model_states.pt`. An imported checkpoint gives
back the files it came from, tensor for tensor. There is no optimizer state in them: give the
published program `no_load_optim: true`. With another number of parts than it was trained with, give
it also `make_vocab_size_divisible_by`: the padded vocabulary divided by N, which it compares.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron import entry
from megatron.config import ConfigError
from megatron.engine.checkpoint.exchange import export_checkpoint
from megatron.engine.errors import CheckpointError


@entry.reports(CheckpointError, ConfigError)
def main() -> int:
    """Exit code 0, or 1 with what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parts_help = "tensor-parallel parts (default: as many as it was trained with)"
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
