"""Convert a run's newest checkpoint, in any layout, into DeepSpeed's universal format.

    python tools/reshape_checkpoint.py RUN OUT [--tag global_stepN] [--workers 4]

OUT/global_stepN/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt then hold each parameter whole,
whatever its layout was. Training needs no such step: train.py converts by itself.
This is for doing it beforehand, on a machine without the job, or for reading optimizer state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron import entry
from megatron.engine.checkpoint import manifest
from megatron.engine.checkpoint import relayout as universal
from megatron.engine.checkpoint import saved as checkpoint
from megatron.engine.checkpoint.saved import CheckpointError
from megatron.engine.job.exit import user_errors
from megatron.parallel import build_groups


def reshape(run: Path, out: Path, tag: str | None, workers: int) -> Path:
    """Convert, and return the folder written.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or cannot be converted.
    """
    import torch

    tag = tag or checkpoint.newest(run)
    if tag is None or not (run / tag).is_dir():
        raise CheckpointError(f"{run} holds no checkpoint {tag or ''}".rstrip())
    problem = manifest.damage(run / tag, build_groups(torch.device("cpu")))
    if problem:
        raise CheckpointError(f"{run / tag} is damaged: {problem}")
    record = checkpoint.read_record(run, tag)
    layout = record["layout"]
    why = universal.refusal(layout, layout | {"model_parallel_size": 1})  # to be written whole
    if why:
        raise CheckpointError(f"{run / tag} cannot be converted: {why}")
    unfinished, final = out / f".unfinished-{tag}" / tag, out / tag
    if final.exists():
        raise CheckpointError(f"{final} is there already; name another folder")
    universal.convert(run / tag, unfinished, record, workers=workers)
    unfinished.rename(final)
    (unfinished.parent / "latest_universal").unlink(missing_ok=True)
    unfinished.parent.rmdir()
    return final


def main() -> int:
    """Exit code 0 on success, 1 for an error that the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with `latest` and global_step folders")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--tag", help="checkpoint to convert (default: the newest)")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least 1")
    if not args.run.is_dir():
        parser.error(f"{args.run}: no such folder; name the `save` folder of a run")
    with user_errors() as outcome:
        print(f"written to {reshape(args.run, args.out, args.tag, args.workers)}")
    return outcome.code


if __name__ == "__main__":
    entry.run(main)
