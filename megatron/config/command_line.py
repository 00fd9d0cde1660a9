"""Parse the arguments that several commands share (config files, overrides); load the config."""

import argparse
import json
import sys
from pathlib import Path

from megatron import entry, launcher
from megatron.config.errors import ConfigError
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.run_folder import RunFolder

# The config keys that GPT-NeoX also takes as options of the command line.
_KEYS = ("wandb_group", "wandb_team", "wandb_run_name")


def config_parser(description: str | None, default: str = "") -> argparse.ArgumentParser:
    """Return a parser for config files and `-o K=V` overrides. The caller adds its own options.

    The parser also accepts options of GPT-NeoX's `deepy.py`, such as `--conf_dir`.

    Args:
        description: The command's description in its help.
        default: A help text that tells the user which config the command uses if the command line
            names no config file. With a non-empty text, config files are optional. With an empty
            text, the command line must name at least one config file.
    """
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    count, text = ("*", f"later files win {default}") if default else ("+", "later files win")
    add("configs", nargs=count, metavar="FILE.yml", help=text)
    add("-d", "--conf_dir", metavar="DIR", default="", help="folder of the files")
    for key in _KEYS:
        add(f"--{key}", metavar="NAME", help=f"the same as -o {key}=NAME")
    add("-H", "--hostfile", help=argparse.SUPPRESS)
    text = "wins over the files"
    add("-o", dest="overrides", action="append", default=[], metavar="K=V", help=text)
    add("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def load_or_exit(arguments: argparse.Namespace, *overrides: str, joins: bool = True) -> Config:
    """Load the config that the command line names, and check it for the job's number of processes.

    If the config or the launcher's environment variables have problems, print the problems and exit
    with code 2.

    Args:
        arguments: The command line, parsed by the parser that `config_parser` returns.
        overrides: More `key=value` overrides. They take precedence over `-o` options.
        joins: Whether the command joins the job that torchrun or another launcher started. If
            false, the command runs alone and opens no connection.
    """
    if arguments.hostfile:
        text = "-H: torchrun, srun or deepspeed start the processes, e.g. deepspeed --hostfile "
        entry.refuse(f"error: {text}{arguments.hostfile} train.py ... (docs/cluster.md)", 2)
    try:
        launcher.join() if joins else launcher.stay_out()
        return load_for(launcher.world_size(), arguments, *overrides)
    except (ConfigError, launcher.LaunchError) as error:
        entry.refuse(str(error), 2)


def load_for(processes: int | str, arguments: argparse.Namespace, *overrides: str) -> Config:
    """Load the config that the command line names, and check it for a number of processes.

    Args:
        processes: The number of processes, as an int or as the text of WORLD_SIZE.
        arguments: The command line, parsed by the parser that `config_parser` returns.
        overrides: More `key=value` overrides. They take precedence over `-o` options.

    Raises:
        ConfigError: The config has problems.
    """
    files = [Path(arguments.conf_dir, name) for name in arguments.configs]
    named = [(key, getattr(arguments, key)) for key in _KEYS]
    given = [f"{key}={json.dumps(value)}" for key, value in named if value is not None]
    return load_config(files, [*given, *arguments.overrides, *overrides], world_size=processes)


USE = """
pipe_parallel_size=1 context_parallel_size=1 sequence_parallel=false train_batch_size=null
gradient_accumulation_steps=null train_micro_batch_size_per_gpu=1 torch_compile=false
torch_compile_mode=default optimizer=null optimizer.type=Adam optimizer.params.lr=1.0"""
"""The overrides of a config whose model is used, not trained."""


def sharing_layout(processes: int | str) -> tuple[str, ...]:
    """Return config overrides that split one model over all processes.

    The overrides set the degree of tensor parallelism to `processes`. With these overrides, the
    model can be used but not trained.

    Args:
        processes: The number of processes.
    """
    # Muon refuses tensor parallelism, but nothing is trained here.
    return (f"model_parallel_size={processes}", *USE.split())


def load_for_use_or_exit(arguments: argparse.Namespace, run: Path, *overrides: str) -> Config:
    """Load the config for using, but not training, the model in the run folder `run`.

    In this config, tensor parallelism splits the model over all processes of the job. If the
    command line names no config file, the config is the run's `config.yml`. If that file is
    missing, or if the config has problems, print the reason and exit.

    Args:
        arguments: The command line, parsed by the parser that `config_parser` returns.
        run: The path of the run folder.
        overrides: More `key=value` overrides. They take precedence over `-o` options.
    """
    if not run.is_dir():
        entry.refuse(f"error: {run}: there is no such folder", 1)
    if not arguments.configs:
        arguments.configs, arguments.conf_dir = [RunFolder(run).config], ""
        if not arguments.configs[0].is_file():
            command = Path(sys.argv[0]).name
            text = f"{run} has no config.yml; name the config files: {command} FILE.yml ..."
            entry.refuse(f"error: {text}", 1)
    arguments.overrides.insert(0, "attention_backend=auto")  # the run may have used another device
    return load_or_exit(arguments, *sharing_layout(launcher.world_size()), *overrides)
