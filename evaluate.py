"""Perplexity by length: `python evaluate.py CONFIG.yml --load DIR --lengths 512,1024,2048`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from megatron import entry
from megatron.config import ConfigError, load_config


def main() -> int:
    """Exit code 0 on success, 2 for a config error, 1 for any other that the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+", metavar="FILE.yml", help="later files win")
    overrides_help = "wins over the files"
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="K=V", help=overrides_help
    )
    parser.add_argument("--load", type=Path, help="run folder (default: the config's load or save)")
    parser.add_argument("--lengths", help="comma-separated (default: the config's eval_lengths)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: the run folder)")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.lengths is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", args.lengths):
        parser.error(f"--lengths {args.lengths}: write whole numbers, e.g. 512,1024,2048")
    # A rank evaluates the whole model, however the run that trained it was laid out.
    overrides = [*args.overrides, "pipe_parallel_size=1", "model_parallel_size=1"]
    overrides += ["context_parallel_size=1", "sequence_parallel=false"]
    batch = ("train_batch_size=null", "gradient_accumulation_steps=null")
    overrides += [*batch, "train_micro_batch_size_per_gpu=1"]
    if args.lengths:
        overrides.append(f"eval_lengths=[{args.lengths}]")
    try:
        world_size = os.environ.get("WORLD_SIZE", "1")
        config = load_config(args.configs, overrides, world_size=world_size)
    except ConfigError as error:
        return refuse(str(error), 2)
    load = args.load or config.checkpoint.load or config.checkpoint.save
    missing = [] if load else ["--load DIR (or `load` in the config)"]
    if not config.evaluation.eval_lengths:
        missing.append("--lengths L1,L2,... (or `eval_lengths` in the config)")
    if missing:
        return refuse(f"error: nothing to evaluate; give {' and '.join(missing)}", 2)
    out = args.out or Path(load)
    try:  # what cannot be written is better known before all is measured
        if args.out:
            out.mkdir(parents=True, exist_ok=True)
        if out.is_dir() and not os.access(out, os.W_OK):
            raise PermissionError("no permission to write there")
    except OSError as error:
        return refuse(f"error: results in {out}: {error}; give --out DIR", 1)
    from megatron.engine.evaluation.by_length import evaluate_checkpoint
    from megatron.engine.job.exit import user_errors

    with user_errors() as outcome:
        evaluate_checkpoint(config, Path(load), config.evaluation.eval_lengths, out=args.out)
    return outcome.code


def refuse(text: str, code: int) -> int:
    """Say why nothing is done, and return `code`; in a job that ends all its processes."""
    if "RANK" in os.environ:
        from megatron.engine.job import failure

        if failure.is_member():
            failure.end_process(text, code=code)
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    entry.run(main)
