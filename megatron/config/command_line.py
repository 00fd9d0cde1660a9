"""Parse the arguments that `train.py` and `evaluate.py` share: config files and overrides."""

from __future__ import annotations

import argparse
import os

from megatron import entry
from megatron.config.errors import ConfigError
from megatron.config.load import load_config
from megatron.config.schema import Config


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `FILE.yml ... -o K=V ...`, to which the caller adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("configs", nargs="+", metavar="FILE.yml", help="later files win")
    parser.add_argument(
        "-o",
        dest="overrides",
        action="append",
        default=[],
        metavar="K=V",
        help="wins over the files",
    )
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def load_or_exit(arguments: argparse.Namespace, *overrides: str) -> Config:
    """Load the config that the command line selects, for the current number of processes.

    The number of processes is read from the environment variable WORLD_SIZE, which torchrun sets;
    without WORLD_SIZE it is 1. If the config has problems, print them and exit with code 2.

    Args:
        arguments: The arguments parsed by the parser that `config_parser` returns.
        overrides: More `key=value` overrides, which take precedence over `-o` options.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    try:
        return load_config(
            arguments.configs, [*arguments.overrides, *overrides], world_size=world_size
        )
    except ConfigError as error:
        entry.refuse(str(error), 2)
