"""Find and run what comes with the project: commands, tools and configs.

In a checkout they are beside `megatron`, in an installation in the folder `kerple` beside
`megatron`. The command `kerple NAME` runs the script of this name (`kerple_command`).
"""

import os
import sys
from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[1]
_INSTALLED = _BESIDE / "kerple"
ROOT = _INSTALLED if (_INSTALLED / "train.py").is_file() else _BESIDE
"""The folder with the commands, `tools` and `configs`."""


def find(path: Path | str) -> Path:
    """Return the existing file that `path` means, or `path` itself if there is none.

    A file of the user comes first, then the shipped one. Of both, the ending `.yml` may be left
    out, and of a shipped file the folder `configs/`: `quickstart` is `configs/quickstart.yml`.
    """
    for each in (Path(path), shipped(path)):
        for place in (each, Path(f"{each}.yml")):
            if os.path.exists(place) and not os.path.isdir(place):
                return place
    return Path(path)


def shipped(path: Path | str) -> Path:
    """Return the place of `path` among the shipped configs. It may be missing."""
    parts = Path(path).parts
    return ROOT.joinpath("configs", *parts[parts[:1] == ("configs",) :])


def kerple_command() -> int:
    """Run the command that the command line names, such as `kerple train quickstart --check`.

    A name is that of a script, with `-` for `_`: `kerple export-hf` runs `tools/export_hf.py` with
    the remaining arguments. `kerple prepare` runs `prepare_data.py`. `kerple path` prints the
    folder with the shipped files, such as `configs/recipes/own_160M.yml`.

    Returns:
        2 if there is no such command, else 0 after `--help` and `path`.
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
