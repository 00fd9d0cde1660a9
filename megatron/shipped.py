"""Find the commands, tools and configs that come with the project, and run the commands.

In a checkout, these files are beside the folder `megatron`. In an installation, they are in the
folder `kerple` beside `megatron`. The command `kerple NAME` runs the script NAME.
"""

import os
import sys
from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[1]
_INSTALLED = _BESIDE / "kerple"
ROOT = _INSTALLED if (_INSTALLED / "train.py").is_file() else _BESIDE
"""The folder with the commands, `tools` and `configs`."""


def find(path: Path | str) -> Path:
    """Return the path of the file that `path` names, or `path` itself if there is no such file.

    A file of the user takes precedence over a config that comes with the project. The ending `.yml`
    may be left out. The folder `configs/` of a config that comes with the project may also be left
    out: `quickstart` means `configs/quickstart.yml`.
    """
    for each in (Path(path), shipped(path)):
        for place in (each, Path(f"{each}.yml")):
            if os.path.exists(place) and not os.path.isdir(place):
                return place
    return Path(path)


def shipped(path: Path | str) -> Path:
    """Return the path of the project's config `path`. The file may be missing."""
    parts = Path(path).parts
    return ROOT.joinpath("configs", *parts[parts[:1] == ("configs",) :])


def kerple_command() -> int:
    """Run the command that the command line names, such as `kerple train quickstart --check`.

    A command has the name of its script, with `-` instead of `_`: `kerple export-hf` runs
    `tools/export_hf.py` with the remaining arguments. `kerple prepare` runs `prepare_data.py`.
    `kerple path` prints the folder with the files that come with the project, such as
    `configs/recipes/own_160M.yml`.

    Returns:
        The exit code: 2 if there is no such command, 0 after `--help` and `path`. After other
        commands, the function does not return.
    """
    scripts = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/[!_]*.py")])
    by_name = {path.stem.replace("_", "-"): str(path) for path in scripts}
    by_name["prepare"] = by_name.pop("prepare-data")
    name, *arguments = sys.argv[1:] or [""]
    if name not in by_name:
        usage = "\n  ".join(["usage: kerple COMMAND [ARGUMENT ...]", "COMMAND is one of", *by_name])
        print(ROOT if name == "path" else f"{usage}\n  path")
        return 0 if name in ("-h", "--help", "path") else 2
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))  # the first for `import tools`
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, by_name[name], *arguments])
