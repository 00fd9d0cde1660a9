"""Record where a run comes from, in the file `run.json` of its folder.

    {"starts": [{"run": "9f2c...", "step": 0, "time": ..., "command": [...], ...}, ...],
     "patches": {"3b5f...": "diff --git a/..."}}

Each start of the run adds an entry to `starts`: the id of the run (`lineage` in its checkpoints),
the first step, the checkpoint and its run, the command and its folder, the commit and the name of a
patch, the number of ranks by host, device and driver, the versions of all packages, the environment
variables that steer libraries, and the values that fix the samples. `patches` has the difference
between a commit and the files that ran, new Python and YAML files included.

Secrets are not recorded: no environment variable but those of `_STEERING`, no user or password of
an address, no value of a secret variable, and nothing that looks like `api_key=...`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
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
_STEERING = re.compile(
    "(CUDA|CUBLAS|NCCL|GLOO|TORCH|PYTORCH|OMP|GOMP|MKL|ONEDNN|TRITON|SLURM_JOB|WORLD_SIZE)(_|$)"
)
_SECRET_NAME = re.compile("(?i)key|token|secret|passw|credential")
_SECRETS = (
    (re.compile(r'(\w://)[^/\s@"]+@'), r"\1***@"),
    (re.compile(r"""(?i)((api_?key|secret|passw(or)?d|token)[\\"']*\s*[=:]\s*[\\"']*)"""
                r"(?=[\w+/-]*\d)[\w+/-]{12,}"), r"\1***"),
)  # fmt: skip


def record_start(
    folder: Path, groups: Groups, run: RunDescription, start: Start, say: Callable[[str], None]
) -> None:
    """Add this start to `run.json` in `folder`. Every rank must call this function.

    If the file is damaged or cannot be written, the function says so and returns.

    Args:
        run: The description of the run, which its checkpoints record.
        say: A function that prints a line for the user.
    """
    machines = groups.gather_from_job(_machine(groups.device))
    if not groups.is_main:
        return
    code, patch = code_of(Path(__file__).parents[2])
    saved, path = start.saved, RunFolder(folder).provenance
    at = f"commit {code['commit'][:12]}" if code["commit"] else code["why"]
    say(f"run {run.lineage[:12]}: code {__version__}, {at}{', changed' if patch else ''}")
    entry = {
        "run": run.lineage,
        "step": start.progress.step,
        "from": str(saved.path.resolve()) if saved else None,
        "from_run": saved.lineage if saved else None,
        "time": now(),
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "code": code,
        "ranks": Counter(machines),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _STEERING.match(k)},
        "data": run.data,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {each.name: each.version for each in metadata.distributions()},
    }
    try:
        found: dict[str, Any] = {"starts": [], "patches": {}}
        if path.exists():
            found = parse_json(read_small(path, MOST_BYTES))
        found["starts"].append(json.loads(without_secrets(json.dumps(entry))))
        found["patches"] |= {code["patch"]: patch} if patch else {}
        write_text(path, json.dumps(found, indent=1) + "\n")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        say(f"{path}: this start is not recorded, training goes on: {error}")


def without_secrets(text: str) -> str:
    """Return `text` with `***` in the place of each secret."""
    for name, secret in os.environ.items():
        if _SECRET_NAME.search(name) and len(secret) >= 8:
            text = text.replace(secret, "***")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _machine(device: torch.device) -> str:
    """Return the host, the device and the driver of this rank."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    return f"{socket.gethostname()}: {name}, driver {driver_version() or '-'}"


def code_of(root: Path) -> tuple[dict[str, Any], str]:
    """Return what is known about the code in the folder `root`, and its difference to the commit.

    The commit is None, and `why` says the reason, if the folder is no checkout of git or git does
    not work.
    """
    about: dict[str, Any] = {"version": __version__, "fingerprint": fingerprint()}
    try:
        _git(root, "ls-files", "--error-unmatch", "train.py")  # not just inside of a checkout
        commit = _git(root, "rev-parse", "HEAD").strip()
        patch = without_secrets(_patch(root))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", b"") or str(error).encode()).decode(errors="replace")
        why = f"no commit is known ({said.strip().partition(chr(10))[0]})"
        return about | {"commit": None, "why": why, "patch": None}, ""
    if len(patch) > LONGEST_PATCH:
        patch = f"{patch[:LONGEST_PATCH]}\n(cut: the patch has {len(patch):,} characters)\n"
    name = hashlib.sha256(patch.encode()).hexdigest()[:12] if patch else None
    return about | {"commit": commit, "patch": name}, patch


def _patch(root: Path) -> str:
    """Return the difference between the commit and the files below `root`, as git prints it."""
    show = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--relative")
    real, objects = (
        str(root / _git(root, "rev-parse", "--git-path", name).strip())
        for name in ("index", "objects")
    )
    with tempfile.TemporaryDirectory() as folder:
        # An index of its own, in which new files are marked, so that git shows them.
        index = {"GIT_INDEX_FILE": shutil.copy(real, folder), "GIT_OBJECT_DIRECTORY": folder}
        index["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects
        _git(root, "add", "--intent-to-add", "--", "*.py", "*.yml", **index)
        return _git(root, *show, **index)


def _git(root: Path, *command: str, **variables: str) -> str:
    command = ("git", "-C", str(root), *command)
    found = {"capture_output": True, "check": True, "timeout": 30, "env": os.environ | variables}
    return subprocess.run(command, **found).stdout.decode(errors="replace")
