"""Parse every command of the pages with its program's own parser, and load the configs it names.

Commands are in blocks marked `bash`, in indented lines and between backticks. The programs stop as
soon as their arguments are parsed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config import ConfigError, load_config

PAGES = [
    *("README", "ARCHITECTURE", "SECURITY", "CONTRIBUTING", "configs/README", "tools/README"),
    *("tests/ptx/README", "benchmarks/results/data_prep"),
]
LAUNCHERS = ("python", "torchrun", "deepspeed", "sbatch", "srun", "mpirun")
COMMAND = re.compile(rf"(?:\w+=\S+ )*(?:{'|'.join(LAUNCHERS)}|pip|docker|kerple) |[a-z_/]+\.py \S")
FOREIGN = {
    *("apt-get", "cd", "cp", "done", "for", "git", "make", "mkdocs", "npm", "source"),
    *("mkdir", "paste", "scancel", "tail", "tar", "tensorboard", "wandb"),
}
OWN_CONFIGS = re.compile(
    r"(runs|RUN|gpt-neox|kerple_configs)/|\$|[A-Z]+(\.yml)?$|(.*/)?(a|b|my\w*)\.yml$|\.\.\.$"
)
"""Matches the names of config files that the reader writes, or that other commands make."""


class Parsed(BaseException):
    """Stops a program; its argument is what the program's parser returned."""


class Refused(Exception):
    """A command that cannot work; the message says why."""


def commands(text: str) -> list[tuple[str, bool]]:
    """Return pairs (command, whether it may be abbreviated) of a page."""
    joined = text.replace("\\\n", " ")
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", joined, re.MULTILINE | re.DOTALL))
    indented = [line.strip() for line in re.findall(r"^    (.+)", joined, re.MULTILINE)]
    whole = [line for line in blocks.splitlines() if line.strip()]
    whole += [line for line in indented if COMMAND.match(line) and ".py:" not in line]
    inline = [each for each in re.findall(r"`([^`\n]+)`", joined) if COMMAND.match(each)]
    return [(line, False) for line in whole] + [(each, True) for each in inline]


def parts(command: str) -> Iterator[list[str]]:
    """Yield the words of each program of a command, with numbers in place of N and I."""
    text = command.replace("I/N", "1/2").replace("HOST:PORT", "host:1")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    for separator, group in itertools.groupby(lexer, lambda word: word in ("&&", ";", "|")):
        found = [re.sub(r"\bN$", "2", word.strip("[]")) for word in group if word != "..."]
        while found and (re.match(r"\w+=", found[0]) or found[0] == "do"):
            del found[0]
        if found and not separator and found[0] not in FOREIGN:
            yield found[: found.index(">")] if ">" in found else found


@pytest.fixture
def check(repo_root, monkeypatch, request):
    """Return check(command, short), which raises `Refused` if the command cannot work."""
    monkeypatch.chdir(repo_root)
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def stop(self, args=None, namespace=None, *, _original=original):
            raise Parsed(_original(self, args, namespace))

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    monkeypatch.setattr(argparse.ArgumentParser, "error", _raise)
    environ = dict(os.environ)

    def check(command: str, short: bool) -> None:
        for found in parts(command):
            try:
                _check(found, request.config)
            except Refused as refused:
                if not short or not re.search("required|expected one argument", str(refused)):
                    raise

    yield check
    os.environ.clear()
    os.environ.update(environ)


def _raise(parser: argparse.ArgumentParser, message: str) -> None:
    raise Refused(message)


def _check(found: list[str], config: pytest.Config) -> None:
    program, rest = found[0].rpartition("/")[2], found[1:]
    starts = [i for i, word in enumerate(rest) if word in LAUNCHERS or word.endswith(".py")]
    if program in ("srun", "mpirun", "docker"):
        for start in starts[:1]:
            _check(rest[start:], config)
    elif program in ("torchrun", "deepspeed"):
        _launcher(program, rest, config)
    elif program == "sbatch":
        at = next(i for i, word in enumerate(rest) if not word.startswith("-"))
        started = {"train": "train.py", "sweep": "tools/sweep.py"}[Path(rest[at]).stem]
        _check([started, *rest[at + 1 :]], config)
    elif program == "kerple":
        name = rest[0].replace("-", "_")
        if rest[0] not in ("NAME", "--help", "path"):
            _check([{"prepare": "prepare_data"}.get(name, name) + ".py", *rest[1:]], config)
    elif program == "pip":
        _pip(rest)
    elif re.fullmatch("python3?(.11)?", program) and rest[:1] == ["-m"]:
        _module(rest[1], rest[2:], config)
    elif re.fullmatch("python3?(.11)?", program) and rest[:1] != ["-c"]:
        _check(rest, config)
    elif program.endswith(".py"):
        places = [Path(folder, found[0]) for folder in ("", "tools")]
        script = next((place for place in places if place.is_file()), None)
        if not script:
            raise Refused(f"{found[0]}: no such file")
        _script(str(script), rest)
    elif not program.startswith("python"):
        raise Refused(f"{program}: an unknown program; FOREIGN lists those of others")


def _launcher(program: str, rest: list[str], config: pytest.Config) -> None:
    """Parse the launcher's own options, then the command that it starts."""
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = _parsed(get_args_parser().parse_args, rest)
        script, arguments = parsed.training_script, parsed.training_script_args
    else:
        from deepspeed.launcher.runner import parse_args

        parsed = _parsed(parse_args, rest)
        script, arguments = parsed.user_script, parsed.user_args
    _check([script, *arguments], config)


def _parsed(function, *arguments) -> argparse.Namespace:
    try:
        function(*arguments)
    except Parsed as parsed:
        return parsed.args[0]
    raise AssertionError("the program did not parse its arguments")


def _module(name: str, rest: list[str], config: pytest.Config) -> None:
    if name == "pytest":
        known, unknown = config._parser.parse_known_and_unknown_args(rest)
        missing = [path for path in known.file_or_dir if not Path(path).exists()]
        if unknown or missing:
            raise Refused(f"pytest: {unknown} {missing}")
    elif name != "venv":
        places = [Path(name.replace(".", "/"), "__main__.py"), Path(name.replace(".", "/") + ".py")]
        _script(str(next(place for place in places if place.is_file())), rest)


def _pip(rest: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    for word, following in zip(rest, [*rest[1:], ""], strict=True):
        if word in ("-r", "-c") and not Path(following).is_file():
            raise Refused(f"{following}: no such file")
        if (extra := re.fullmatch(r"\.\[(\w+)\]?", word)) and extra[1] not in known:
            raise Refused(f"{word}: no such extra")


def _script(script: str, rest: list[str]) -> None:
    """Let a script parse its arguments, and load the configs that they name."""
    if missing := [word for word in rest if not _exists(word)]:
        raise Refused(f"{', '.join(missing)}: no such file")
    if not re.search(r"argparse|entry\.parser|config_parser", Path(script).read_text()):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *rest])
        patch.syspath_prepend(Path(script).parent)  # one script of docs/lab imports another
        try:
            runpy.run_path(script, run_name="__main__")
        except Parsed as parsed:
            arguments = parsed.args[0]
    if hasattr(arguments, "overrides"):
        _configs(arguments)


def _exists(word: str) -> bool:
    return not word.startswith("configs/") or OWN_CONFIGS.search(word) or Path(word).exists()


def _configs(arguments: argparse.Namespace) -> None:
    """Load the configs. The quickstart's stands for those that the reader writes."""
    names = [os.path.join(arguments.conf_dir, name) for name in arguments.configs]
    paths = [Path(name) for name in names if not OWN_CONFIGS.search(name)]
    overrides = [override for override in arguments.overrides if "$" not in override]
    if len(paths) < len(names) or not names:
        paths.insert(0, Path("configs/quickstart.yml"))
        overrides.insert(0, "optimizer.type=Adam")  # the quickstart's Muon allows fewer layouts
    load_config(paths, overrides, world_size=8)


def pages(root: Path) -> list[str]:
    docs = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return [*(f"{page}.md" for page in PAGES), *docs]


@pytest.mark.parametrize("page", pages(Path(__file__).parents[2]))
def test_every_command_of_a_page_is_accepted(repo_root, check, page):
    wrong = []
    for command, short in commands((repo_root / page).read_text()):
        try:
            check(command, short)
        except Exception as error:
            wrong.append(f"{command}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_command_that_makes_the_arena_is_accepted(repo_root, check, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "docs" / "lab")
    rebuild = importlib.import_module("rebuild_arena")
    every = [command for part in rebuild.PARTS for command in rebuild.commands(part, 2)]
    assert len(every) > 15
    for command in every:
        check(command, False)


@pytest.mark.parametrize(
    "command, why",
    [
        ("python train.py configs/quickstart.yml -o train_iterz=5", "did you mean train_iters"),
        ("python train.py configs/quickstrat.yml", "no such file"),
        ("torchrun --nproc-per-node=2 train.py my.yml -o bf16=true", "expected a mapping"),
        ("torchrun --processes=2 train.py my.yml", "unrecognized arguments"),
        ("sbatch --nodes=4 tools/slurm/train.sbatch my.yml --chekc", "unrecognized arguments"),
        ("docker run kerple python evaluate.py my.yml --lenghts 5", "unrecognized arguments"),
        ("cd x && python tools/no.py", "no such file"),
        ("python tools/sweep.py configs/paper/no.yml", "no such file"),
        ("python -m pytest --dits loadfile", "pytest"),
        ("python -m pytest tests/no.py", "tests/no.py"),
        ("pip install -e '.[dve]'", "no such extra"),
        ("kerple train quickstrat", "did you mean quickstart.yml"),
        ("torchrun --no-python kerple tarin quickstart", "no such file"),
        ("kerpel train", "an unknown program"),
    ],
)
def test_a_wrong_command_is_noticed(check, command, why):
    with pytest.raises((Refused, ConfigError), match=why):
        check(command, False)
