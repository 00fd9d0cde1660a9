"""Test the command lines of GPT-NeoX's and KERPLE's READMEs, with `deepy.py` left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import Config
from megatron.config.command_line import config_parser, load_for, load_or_exit, sharing_layout


def parse(base: Path, line: str) -> Config:
    """Load the config of a command line, in which DIR stands for the folder of `base`."""
    words = line.replace("DIR", str(base.parent)).split()
    return load_or_exit(config_parser("").parse_intermixed_args(words), joins=False)


@pytest.mark.parametrize(
    "line",
    [
        "DIR/base.yml DIR/local_setup.yml",
        "-d DIR base.yml local_setup.yml",
        "--conf_dir DIR base local_setup",
        "DIR/base DIR/local_setup",
        "-d DIR base local_setup --wandb_group g --wandb_team=t --wandb_run_name r",
        "base -o wandb_group=g local_setup -d DIR --wandb_group other",
    ],
)
def test_the_command_lines_of_the_readmes(base: Path, line: str) -> None:
    (base.parent / "local_setup.yml").write_text("save: runs\nload: runs\n")
    (base.parent / "base").mkdir(exist_ok=True)  # such as configs/llama beside configs/llama.yml
    config = parse(base, line)
    assert config.sources == tuple(f"{base.parent}/{n}.yml" for n in ("base", "local_setup"))
    assert config.checkpoint.save == "runs"
    assert config.logging.wandb_group == ("g" if "wandb" in line else None)
    assert config.logging.wandb_team == ("t" if "wandb_team" in line else None)


def test_a_name_that_reads_as_a_number_is_text(base: Path) -> None:
    assert parse(base, "DIR/base --wandb_group 6e4").logging.wandb_group == "6e4"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-d DIR base missing", "/missing: no such file"),
        ("DIR/base -H hosts", "deepspeed --hostfile hosts train.py"),
    ],
)
def test_mistakes_are_named(base: Path, line: str, says: str, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse(base, line)
    assert leaving.value.code == 2 and says in capsys.readouterr().err


def test_a_compiled_run_is_used_by_several_processes(base: Path) -> None:
    with base.open("a") as file:
        file.write("torch_compile: true\ntorch_compile_mode: max-autotune\n")
    arguments = config_parser("use").parse_args([str(base)])
    config = load_for(2, arguments, *sharing_layout(2))
    assert config.parallel.model_parallel_size == 2 and not config.training.torch_compile
