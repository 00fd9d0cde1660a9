"""A command that is hurt: how it is prepared, and what must hold after it. Training is the first.

Each works in the folder `FOLDER/now`, which is copied from `FOLDER/before` for each trial. What
the command needs and does not change is in `FOLDER/given`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.parallel.groups import build_groups
from megatron.run_folder import RunFolder
from tests.faults.trace import Call, run_traced
from tests.helpers.jobs import BASE, all_but_speed, digest, write_config, write_shards

STEPS = 8
RUN = {
    "train_iters": STEPS,
    "save_interval": 2,
    "eval_interval": 4,
    "keep_last_n_checkpoints": 2,
    "train_micro_batch_size_per_gpu": 4,
}


@dataclass
class Case:
    """A command that writes files.

    Attributes:
        folder: The folder of the case (see the module docstring).
        command: A path of a script, and its arguments.
        result: A function of the folder `now`: what the command has to leave there.
        whole: A function of the folder `now`, called after a command that failed. It raises an
            AssertionError if something is half written that other commands would take as whole.
        survives: A function of the folder `now` after a power loss and the calls before it. It
            raises an AssertionError if something is lost that was announced as saved.
        may_refuse: A function of what the command printed and of `now`: whether the command may
            fail when it is given again after a power loss.
    """

    folder: Path
    command: list[str]
    result: Callable[[Path], object]
    whole: Callable[[Path], None]
    survives: Callable[[Path, Sequence[Call]], None] = lambda now, calls: None
    may_refuse: Callable[[str, Path], bool] = lambda text, now: False

    @property
    def now(self) -> Path:
        return self.folder / "now"

    def reset(self) -> None:
        """Make the folder `now` as it was before the command."""
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.folder / "before", self.now, symlinks=True)


def file_hashes(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return a hash of each file below `folder` that matches `pattern`, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def run_once(*command: object) -> str:
    """Run a command of the project, which must succeed."""
    done = run_traced([str(each) for each in command], None)
    assert done.code == 0, done.text
    return done.text


def training_result(run: Path) -> object:
    """Return what a run has trained and logged: weights, optimizer, metrics."""
    return RunFolder(run).newest_tag(), digest(run), all_but_speed(run)


def require_intact(run: Path, step: int) -> None:
    """Check that the newest checkpoint of a run is intact, and of this step or a later one.

    Its name may not be in `latest` yet. The next start then puts it there.
    """
    tags = RunFolder(run).tags()
    if not step and not tags:
        return
    saved = newest(run)
    assert saved is not None, "no checkpoint is left"
    problem = saved.damage(build_groups(torch.device("cpu")))
    assert problem is None, problem
    assert RunFolder(run).newest_step() >= step, f"only {saved.tag} is left"


def train(folder: Path, *, begun: int = 4, **changes: object) -> Case:
    """A run that goes on after step `begun`. It saves twice and removes two old checkpoints."""
    (folder / "given").mkdir(parents=True)
    (folder / "before").mkdir()
    prefix, now = write_shards(folder / "given"), folder / "now"
    keys = BASE | RUN | {"save": str(now / "run"), "load": str(now / "run")} | changes
    command = ["train.py", str(write_config(folder / "given" / "config.yml", prefix, **keys))]
    if begun:
        run_once(*command, "-o", f"exit_interval={begun}")
        (now / "run").rename(folder / "before" / "run")
    return Case(
        folder, command, lambda now: training_result(now / "run"),
        lambda now: require_intact(now / "run", begun),
        lambda now, calls: saved_survives(now / "run", calls),
    )  # fmt: skip


def saved_survives(run: Path, calls: Sequence[Call]) -> None:
    """Check that the newest checkpoint that was published before a power loss is there, intact."""
    named = published = 0
    for call in calls:
        target = call.paths[-1] if call.kind.startswith("rename") else ""
        if found := re.fullmatch(rf"{run}/global_step(\d+)", target):
            named = int(found[1])
        if target == str(run / "latest"):
            published, named = -named, 0
        if call.kind == "fsync" and call.paths == [str(run)]:
            published = abs(published)
    if published > 0:
        require_intact(run, published)


def async_train(folder: Path) -> Case:
    """The same run, whose checkpoints a thread saves beside training."""
    return train(folder, async_save=True)


def fresh_train(folder: Path) -> Case:
    """A run from its first step, in a new folder."""
    return train(folder, begun=0)
