"""Record where a run comes from, in the file `run.json` of its folder.

    {"starts": [{"run": "9f2c...", "step": 0, "time": ..., "command": [...], ...}, ...],
     "patches": {"3b5f...": "diff --git a/..."}}

Each start of the run adds an entry to `starts`: the id of the run (`lineage` in its checkpoints),
the first step, the checkpoint and its run, the command and its folder, the commit and the name of a
patch, the number of ranks by host, device and driver, the versions of all packages, the environment
variables that configure libraries, and the values that determine the samples. `patches` maps the
name of a patch to its text. A patch contains the uncommitted changes of Python, YAML and TOML
files. New Python files are not in the patch: the list `new` in the dict `code` of an entry names
these files.

Only environment variables whose names match `_STEERING` are recorded. `***` replaces three kinds of
secrets: the values of variables with a name such as `WANDB_API_KEY`, users and passwords in
addresses, and text that matches `_SECRETS`. A secret of another form is recorded. Therefore, do not
write such a secret on a command line.
"""

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.resume import Start
from megatron.engine.gpus import driver_version
from megatron.files import parse_json, read_small, write_text
from megatron.parallel.groups import Groups
from megatron.readable_numbers import now
from megatron.run_folder import MOST_BYTES, RunFolder
from megatron.version import __version__, fingerprint

LONGEST_PATCH = 1 << 20
"""The most characters of a patch that are recorded."""
DEADLINE = 10.0
"""The seconds that all calls of git may take together, because all ranks wait for them."""
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--relative", "--",
         "*.py", "*.yml", "*.toml")  # fmt: skip
_STEERING = re.compile(
    "(CUDA|CUBLAS|NCCL|GLOO|TORCH|PYTORCH|OMP|GOMP|MKL|ONEDNN|TRITON|SLURM_JOB|WORLD_SIZE)(_|$)"
)
_SECRET_NAME = re.compile("(?i)key|token|secret|passw|credential")
# What looks like a secret, after a first group that is kept. `\0` is between two arguments.
_SECRETS = [re.compile(pattern) for pattern in (
    r"""(\w://)[^\s"'\0]+(?=@)""",
    r"""(?i)((?:(?:api|access|private)[_-]?key|secret|passw(?:or)?d)[\\"']*\s*[=:]\s*[\\"']*)"""
    r"""[^\s"'\0&]{6,}""",
    r"""(?i)(token[\\"']*\s*[=:]\s*[\\"']*)(?=[\w+/-]*\d)[\w+/-]{12,}""",
    r"""(?i)(--?[\w-]*(?:key|secret|passw(?:or)?d|token)[\0 =])[^\s"'\0]+""",
    r"""(?i)((?:bearer|authorization:\s*\w+)\s+)[\w.~+/=-]{6,}""",
    r"""(?i)([?&][\w-]*(?:sig|signature|key|token)=)[^\s"'\0&]+""",
    r"""\b(hf_|gh[a-z]_)[A-Za-z0-9]{20,}""",
)]  # fmt: skip


def record_start(
    folder: Path, groups: Groups, run: RunDescription, start: Start, say: Callable[[str], None]
) -> None:
    """Append a record of this start of the run to `folder/run.json`.

    Every rank must call this function.

    Args:
        run: The description of the run, which its checkpoints record.
        start: The checkpoint and counters with which the job starts.
        say: A function that prints a line for the user.
    """
    # The record contains the command, the code, the data, the machines and the versions of all
    # packages. If the file is damaged or cannot be written, print the reason and return.
    machines = groups.gather_from_job(_machine(groups.device))
    if not groups.is_main:
        return
    code, patch = code_of(Path(__file__).parents[2])
    saved, path = start.saved, RunFolder(folder).provenance
    at = f"commit {code['commit'][:12]}" if code["commit"] else code["why"]
    say(f"run {run.lineage[:12]}: code {__version__}, {at}{', changed' if patch else ''}")
    try:
        entry = {
            "run": run.lineage,
            "step": start.progress.step,
            "from": str(saved.path.resolve()) if saved else None,
            "from_run": saved.lineage if saved else None,
            "time": now(),
            "command": without_secrets("\0".join(sys.orig_argv)).split("\0"),
            "folder": os.getcwd(),  # fails in a folder that was deleted
            "code": code,
            "ranks": Counter(machines),
            "environment": {k: v for k, v in sorted(os.environ.items()) if _STEERING.match(k)},
            "data": run.data,
        }
        found: dict[str, Any] = {"starts": [], "patches": {}}
        if path.exists():
            found = parse_json(read_small(path, MOST_BYTES))
        found["starts"].append(_masked(entry) | {"versions": versions()})
        found["patches"] |= {code["patch"]: patch} if patch else {}
        write_text(path, json.dumps(found, indent=1) + "\n")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        say(f"{path}: this start is not recorded, training goes on: {error}")


def without_secrets(text: str) -> str:
    """Return `text` with each secret, such as a password, replaced by `***`."""
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, "***") if len(secret) >= 8 else text
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text


def _masked(value: Any) -> Any:
    """Return a copy of `value` in which `***` replaces each secret in a string."""
    # Strings inside dicts and lists count, too.
    if isinstance(value, dict):
        return {_masked(key): _masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


@cache
def versions() -> dict[str, str | None]:
    """Return the version of Python, of CUDA and of each installed package, by name."""
    packages = (each.metadata for each in metadata.distributions())  # each access reads a file
    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    return found | {each["Name"]: each["Version"] for each in packages}


def _machine(device: torch.device) -> str:
    """Return a text that names the host, the device and the driver of this rank."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    return f"{socket.gethostname()}: {name}, driver {driver_version() or '-'}"


def code_of(root: Path) -> tuple[dict[str, Any], str]:
    """Return (facts about the code in the folder `root`, a patch of uncommitted changes)."""
    # The patch is from the git commit to the code. If git cannot be asked, the commit or the patch
    # in the facts is None, and `why` has the reason. This happens if `root` is no git checkout, or
    # git needs more than `DEADLINE` seconds in total.
    until = time.monotonic() + DEADLINE
    about: dict[str, Any] = {"version": __version__, "fingerprint": fingerprint()}
    about |= {"commit": None, "patch": None}
    try:
        # The folder may lie inside another project's checkout.
        _git(root, until, "ls-files", "--error-unmatch", "train.py")
        about["commit"] = _git(root, until, "rev-parse", "HEAD").strip()
        new = _git(root, until, "ls-files", "--others", "--exclude-standard", "--", "*.py")
        patch = _git(root, until, *_DIFF)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", b"") or str(error).encode()).decode(errors="replace")
        what = "changes are" if about["commit"] else "commit is"
        return about | {"why": f"no {what} known ({said.strip().partition(chr(10))[0]})"}, ""
    if len(patch) > LONGEST_PATCH:
        whole_lines = patch[:LONGEST_PATCH].rpartition("\n")[0]
        patch = f"{whole_lines}\n(cut: the patch has {len(patch):,} characters)\n"
    patch = without_secrets(patch)
    name = hashlib.sha256(patch.encode()).hexdigest()[:12] if patch else None
    return about | {"patch": name, "new": new.splitlines()}, patch


def _git(root: Path, until: float, *command: str) -> str:
    command, left = ("git", "-C", str(root), *command), max(0.0, until - time.monotonic())
    done = subprocess.run(command, capture_output=True, check=True, timeout=left)
    return done.stdout.decode(errors="replace")
