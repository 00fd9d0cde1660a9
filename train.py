"""Train from YAML configs: `python train.py a.yml b.yml -o key=value`, or under torchrun."""

from __future__ import annotations

import argparse
import os
import sys

from megatron import entry
from megatron.config import ConfigError, load_config
from megatron.config.describe import describe


def main() -> int:
    """Exit code 0 on success, 2 for a config error, 1 for any other that the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+", metavar="FILE.yml", help="later files win")
    overrides_help = "wins over the files"
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="K=V", help=overrides_help
    )
    parser.add_argument("--check", action="store_true", help="validate, print the result, stop")
    fallback_help = "pass over a damaged newest checkpoint"
    parser.add_argument("--allow-fallback", action="store_true", help=fallback_help)
    parser.add_argument("-v", "--verbose", action="store_true", help="let DeepSpeed speak")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    try:
        world_size = os.environ.get("WORLD_SIZE", "1")
        config = load_config(args.configs, args.overrides, world_size=world_size)
    except ConfigError as error:
        if "RANK" in os.environ:  # one process of several, perhaps the only one that sees this
            from megatron.engine.job import failure

            if failure.is_member():
                failure.end_process(str(error), code=2)
        print(error, file=sys.stderr)
        return 2
    if args.check:
        print(describe(config))
        return 0
    from megatron.engine.job.exit import user_errors
    from megatron.engine.run import train

    with user_errors() as outcome:
        train(config, verbose=args.verbose, allow_fallback=args.allow_fallback)
    return outcome.code


if __name__ == "__main__":
    entry.run(main)
