"""Parse the arguments that several commands share: config files and overrides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron import entry, launch
from megatron.config.errors import ConfigError
from megatron.config.load import load_config
from megatron.config.schema import Config

_KEYS = ("wandb_group", "wandb_team", "wandb_run_name")
"""The config keys that GPT-NeoX also takes as options of the command line."""


def config_parser(description: str | None, default: str = "") -> argparse.ArgumentParser:
    """Return a parser for `FILE.yml ... -o K=V ...`, to which the caller adds its own options.

    The parser also accepts options of GPT-NeoX's `deepy.py`, such as `--conf_dir`.

    Args:
        description: The command's description in its help.
        default: A help text that says what the command reads if no file is given. If empty, at
            least one file is required.
    """
    parser = argparse.ArgumentParser(description=description)
    count, text = ("*", f"later files win {default}") if default else ("+", "later files win")
    parser.add_argument("configs", nargs=count, metavar="FILE.yml", help=text)
    parser.add_argument("-d", "--conf_dir", metavar="DIR", default="", help="folder of the files")
    for key in _KEYS:
        parser.add_argument(f"--{key}", metavar="NAME", help=f"the same as -o {key}=NAME")
    parser.add_argument("-H", "--hostfile", help=argparse.SUPPRESS)
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


def _file(name: str, folder: str) -> Path:
    """Return the path of the config file `name` in `folder`.

    As in GPT-NeoX, the user may leave out the ending `.yml`.
    """
    path = Path(folder, name)
    with_ending = Path(f"{path}.yml")
    return with_ending if with_ending.is_file() and not path.is_file() else path


def load_or_exit(arguments: argparse.Namespace, *overrides: str, joins: bool = True) -> Config:
    """Load the config that the command line selects, for the job's number of processes.

    If the config or the launcher's environment variables have problems, print the problems and exit
    with code 2.

    Args:
        arguments: The arguments parsed by the parser that `config_parser` returns.
        overrides: More `key=value` overrides. They take precedence over `-o` options.
        joins: Whether the command joins the job that torchrun or another launcher started. If
            false, the command runs alone and opens no connection.
    """
    if arguments.hostfile:
        text = "-H: torchrun, srun or deepspeed start the processes, e.g. deepspeed --hostfile "
        entry.refuse(f"error: {text}{arguments.hostfile} train.py ... (docs/cluster.md)", 2)
    files = [_file(name, arguments.conf_dir) for name in arguments.configs]
    named = [(key, getattr(arguments, key)) for key in _KEYS]
    given = [f"{key}={json.dumps(value)}" for key, value in named if value is not None]
    given += [*arguments.overrides, *overrides]
    try:
        launch.join() if joins else launch.stay_out()
        return load_config(files, given, world_size=launch.world_size())
    except (ConfigError, launch.LaunchError) as error:
        entry.refuse(str(error), 2)


def sharing_layout(processes: int | str) -> tuple[str, ...]:
    """Return config overrides with which the job's processes share one model, without training it.

    The degree of tensor parallelism becomes the number of processes.
    """
    return (
        f"model_parallel_size={processes}",
        "pipe_parallel_size=1",
        "context_parallel_size=1",
        "sequence_parallel=false",
        "train_batch_size=null",
        "gradient_accumulation_steps=null",
        "train_micro_batch_size_per_gpu=1",
        "optimizer=null",  # Muon refuses tensor parallelism, but nothing is trained here
        "optimizer={type: Adam, params: {lr: 1.0}}",
    )
