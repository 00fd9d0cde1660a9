"""The command line that `train.py` and `evaluate.py` share: configs and overrides."""

from __future__ import annotations

import argparse
import os

from megatron import entry
from megatron.config.errors import ConfigError
from megatron.config.load import load_config
from megatron.config.schema import Config


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of `FILE.yml ... -o K=V ...`; the command adds its options."""
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
    """The config of a command line, for the processes that the launcher has started.

    Problems in it are printed and end the command with exit code 2.

    Args:
        arguments: of `config_parser`.
        overrides: win over those of the command line.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    try:
        return load_config(
            arguments.configs, [*arguments.overrides, *overrides], world_size=world_size
        )
    except ConfigError as error:
        entry.refuse(str(error), 2)
