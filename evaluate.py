"""Measure a checkpoint's perplexity at several sequence lengths.

Example: `python evaluate.py CONFIG.yml --load DIR --lengths 512,1024,2048`.
"""

import os
import re
from pathlib import Path

from megatron import entry
from megatron.config.command_line import config_parser, load_or_exit

# Overrides for every evaluation. Each rank holds the full model, even if the model was trained with
# another parallel layout.
LAYOUT = (
    "pipe_parallel_size=1",
    "model_parallel_size=1",
    "context_parallel_size=1",
    "sequence_parallel=false",
    "train_batch_size=null",
    "gradient_accumulation_steps=null",
    "train_micro_batch_size_per_gpu=1",
)


def main() -> int:
    """Evaluate the checkpoint that the command line names, and return the exit code.

    The exit code is 0 on success, 2 for a config error and 1 for any other error that the user can
    fix.
    """
    parser = config_parser(__doc__)
    parser.add_argument("--load", type=Path, help="run folder (default: the config's load or save)")
    parser.add_argument("--lengths", help="comma-separated (default: the config's eval_lengths)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: the run folder)")
    args = parser.parse_intermixed_args()
    if args.lengths is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", args.lengths):
        parser.error(f"--lengths {args.lengths}: write whole numbers, e.g. 512,1024,2048")
    lengths = [f"eval_lengths=[{args.lengths}]"] if args.lengths else []
    config = load_or_exit(args, *LAYOUT, *lengths)
    load = args.load or config.checkpoint.load or config.checkpoint.save
    missing = [] if load else ["--load DIR (or `load` in the config)"]
    if not config.evaluation.eval_lengths:
        missing.append("--lengths L1,L2,... (or `eval_lengths` in the config)")
    if missing or not load:
        entry.refuse(f"error: nothing to evaluate; give {' and '.join(missing)}", 2)
    out = args.out or Path(load)
    try:  # check the output folder now, because the evaluation may take hours
        if args.out:
            out.mkdir(parents=True, exist_ok=True)
        if out.is_dir() and not os.access(out, os.W_OK):
            raise PermissionError("no permission to write there")
    except OSError as error:
        entry.refuse(f"error: results in {out}: {error}; give --out DIR", 1)
    from megatron.engine.evaluation.by_length import evaluate_checkpoint
    from megatron.engine.job.exit_codes import user_errors

    with user_errors():
        evaluate_checkpoint(config, Path(load), config.evaluation.eval_lengths, out=args.out)
    return 0


if __name__ == "__main__":
    entry.run(main)
