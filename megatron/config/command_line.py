"""Parse the arguments that `train.py` and `evaluate.py` share: config files and overrides."""

from __future__ import annotations

import argparse

from megatron import entry, launch
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


def load_or_exit(arguments: argparse.Namespace, *overrides: str, joins: bool = True) -> Config:
    """Load the config that the command line selects, for the job's number of processes.

    If the config or the launcher's variables have problems, print them and exit with code 2.

    Args:
        arguments: The arguments parsed by the parser that `config_parser` returns.
        overrides: More `key=value` overrides, which take precedence over `-o` options.
        joins: Whether the command joins its launcher's job. If not, the command runs alone and
            opens no connection.
    """
    given = [*arguments.overrides, *overrides]
    try:
        launch.join() if joins else launch.stay_out()
        return load_config(arguments.configs, given, world_size=launch.world_size())
    except (ConfigError, launch.LaunchError) as error:
        entry.refuse(str(error), 2)
