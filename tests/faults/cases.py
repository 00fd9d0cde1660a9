"""The commands that are hurt: how each is prepared, and what must hold after it.

Each works in the folder `FOLDER/now`, which is copied from `FOLDER/before` for each trial. What
the command needs and does not change is in `FOLDER/given`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.parallel.groups import build_groups
from megatron.run_folder import RunFolder
from tests.faults.trace import Call, run_traced
from tests.helpers.hub import hub_model, write_tokenizer
from tests.helpers.jobs import BASE, all_but_speed, digest, write_config, write_shards
from tests.helpers.paths import FIXTURES

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


def prepare(folder: Path) -> Case:
    """A preparation of text in four chunks, over an older data set of the same name."""
    (folder / "given").mkdir(parents=True)
    (folder / "before").mkdir()
    words = ["far", "near", "token", "kernel", "distance", "of a text that is a bit longer"]
    texts = [" ".join(words[n % (k + 1)] for k in range(6)) * (n % 7 + 1) for n in range(150)]
    given = folder / "given" / "texts.jsonl"
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["prepare_data.py", "--input", str(given), "--name", "x", "-d", str(folder / "now")]
    command += ["-t", "ByteLevelTokenizer", "--checkpoint-seconds", "0", "--overwrite"]
    (folder / "given" / "old.jsonl").write_text(json.dumps({"text": "An older text."}) + "\n")
    older = [
        each if each != str(given) else str(folder / "given" / "old.jsonl") for each in command
    ]
    run_once(*older)
    (folder / "now").rename(folder / "before")
    old = file_hashes(folder / "before", "x_*")
    run_once(*command)
    new = file_hashes(folder / "now", "x_*")

    def whole(now: Path) -> None:
        if (now / "x_text_document.idx").exists():
            found = file_hashes(now, "x_*")
            parts = {
                suffix: found[f"x_text_document.{suffix}"] for suffix in ("bin", "idx", "json")
            }
            sets = [{s: each[f"x_text_document.{s}"] for s in parts} for each in (old, new)]
            assert parts in sets, "the data set is neither the old one nor the new one"

    return Case(
        folder, command, lambda now: file_hashes(now, "x_*"), whole, lambda now, calls: whole(now)
    )


def import_hf(folder: Path) -> Case:
    """An import of a small GPTNeoX model of transformers."""
    source = folder / "given" / "model"
    hub_model("gpt_neox").save_pretrained(source)
    write_tokenizer(source)
    (folder / "before").mkdir()
    run = folder / "now" / "run"
    return new_folder_case(folder, ["tools/import_hf.py", str(source), str(run)], "run")


def import_kerple(folder: Path) -> Case:
    """An import of a published checkpoint into a new run folder."""
    (folder / "before").mkdir(parents=True)
    source = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint"
    run = folder / "now" / "run"
    return new_folder_case(folder, ["tools/import_kerple.py", str(source), str(run)], "run")


def export_hf(folder: Path) -> Case:
    """An export of a small run for transformers."""
    (folder / "before").mkdir(parents=True)
    (folder / "given").mkdir()
    prefix = write_shards(folder / "given")
    keys = BASE | RUN | {"save": str(folder / "given" / "run"), "train_iters": 2}
    run_once("train.py", write_config(folder / "given" / "config.yml", prefix, **keys))
    target = folder / "now" / "hub"
    return new_folder_case(
        folder, ["tools/export_hf.py", str(folder / "given" / "run"), str(target)], "hub"
    )


def new_folder_case(folder: Path, command: list[str], name: str) -> Case:
    """A command that writes the new folder `now/NAME`, which must be there whole or not at all."""
    shutil.rmtree(folder / "now", ignore_errors=True)
    (folder / "now").mkdir()
    run_once(*command)
    complete = contents(folder / "now" / name)

    def whole(now: Path) -> None:
        if (now / name).exists() and any(not_leases(now / name)):
            assert contents(now / name) == complete, f"{name} is half written"

    def may_refuse(text: str, now: Path) -> bool:
        return "exists and is not empty" in text and contents(now / name) == complete

    return Case(folder, command, contents, whole, lambda now, calls: whole(now), may_refuse)


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of each file below `folder`, without leases."""
    return {name: found for name, found in file_hashes(folder).items() if ".lease-" not in name}


def not_leases(folder: Path) -> list[Path]:
    """Return the entries of `folder`, without leases."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def suite(folder: Path) -> Case:
    """A second `evaluate.py --suite` of a run, with other lengths than the first."""
    return evaluation(folder, ["--suite", "--lengths", "16,32"], ["--suite", "--lengths", "16,24"])


def evaluate(folder: Path) -> Case:
    """A second measurement of perplexity by length of a run."""
    return evaluation(folder, ["--lengths", "16,32"], ["--lengths", "16,24"])


def evaluation(folder: Path, options: list[str], earlier: list[str]) -> Case:
    """An evaluation of a run that holds the results of an earlier one."""
    (folder / "given").mkdir(parents=True)
    prefix, now = write_shards(folder / "given"), folder / "now"
    keys = BASE | RUN | {"save": str(now / "run"), "train_iters": 2}
    config = write_config(folder / "given" / "config.yml", prefix, **keys)
    run_once("train.py", config)
    command = ["evaluate.py", str(config), "--load", str(now / "run")]
    run_once(*command, *earlier)
    shutil.copytree(now, folder / "before")
    run_once(*command, *options)
    old, new = results(folder / "before"), results(now)

    def whole(now: Path) -> None:
        for name, found in results(now).items():
            assert found in (old.get(name), new.get(name), ""), f"{name} is half written"
        require_intact(now / "run", 2)

    return Case(folder, [*command, *options], results, whole)


def results(now: Path) -> dict[str, str]:
    """Return a hash of each result file of the run, without times; previous results count not."""
    found = {}
    for name in file_hashes(now):
        if "global_step" in name or ".previous" in name or name.endswith(".png"):
            continue
        text = (now / name).read_bytes().decode(errors="replace")
        text = re.sub(r'"(date|time|seconds)": [^,}]*|\d\d\d\d-\d\d-\d\d[ T][\d:]+', "", text)
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def sweep(folder: Path) -> Case:
    """A sweep of a grid with one cell, which trains and evaluates."""
    (folder / "given").mkdir(parents=True)
    (folder / "before").mkdir()
    prefix = write_shards(folder / "given")
    base = write_config(folder / "given" / "base.yml", prefix, train_micro_batch_size_per_gpu=4)
    grid = folder / "given" / "grid.yml"
    changes = {"train_iters": 2, "eval_iters": 0, "save_interval": 1, "eval_tokens": 64}
    content = {
        "runs": str(folder / "now" / "runs"),
        "configs": [str(base)],
        "overrides": {"pos_emb": "{embedding}"} | changes,
        "axes": {"embedding": ["kerple_log"]},
        "seeds": [1],
        "lengths": [16, 32],
    }
    grid.write_text(yaml.safe_dump(content))

    def result(now: Path) -> object:
        (run,) = (path for path in (now / "runs").iterdir() if path.is_dir())
        table = (now / "runs" / "cells.csv").read_text()
        state = json.loads((run / "cell.json").read_text())["state"]
        csv = (run / "extrapolation.csv").read_text()
        return training_result(run), state, re.sub(r"\d+\.\d+", "", table), csv

    def whole(now: Path) -> None:
        for run in (now / "runs").glob("*/latest"):
            require_intact(run.parent, 0)

    return Case(folder, ["tools/sweep.py", str(grid)], result, whole)


CASES: dict[str, Callable[[Path], Case]] = {
    "train": train,
    "async_train": async_train,
    "prepare": prepare,
    "import_hf": import_hf,
    "export_hf": export_hf,
    "suite": suite,
    "evaluate": evaluate,
    "sweep": sweep,
}
POWER: dict[str, Callable[[Path], Case]] = {
    "fresh_train": fresh_train,
    "fresh_async_train": lambda folder: train(folder, begun=0, async_save=True),
    "train": train,
    "prepare": prepare,
    "import_hf": import_hf,
}
