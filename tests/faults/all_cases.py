"""The commands that are hurt beside training, and the list of all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.faults.case import (
    RUN,
    Case,
    async_train,
    file_hashes,
    fresh_train,
    require_intact,
    run_once,
    train,
    training_result,
)
from tests.helpers.hub import hub_model, write_tokenizer
from tests.helpers.jobs import BASE, write_config, write_shards
from tests.helpers.paths import FIXTURES
from tools.experiments.grid import read_grid
from tools.experiments.results import of_grid


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
        if "global_step" in name or ".previous" in name or name.endswith((".png", ".svg")):
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
        counted, remarks = of_grid(read_grid(grid, {}))
        csv = (run / "extrapolation.csv").read_text()
        without_times = re.sub(r"\d+\.\d+", "", table)
        return training_result(run), without_times, csv, counted.to_csv(), remarks

    def whole(now: Path) -> None:
        for run in (now / "runs").glob("*/latest"):
            require_intact(run.parent, 0)

    def may_refuse(text: str, now: Path) -> bool:
        """Without `latest`, a job refuses to guess what a whole checkpoint is, and says it."""
        return "latest is missing, but " in text

    command = ["tools/sweep.py", str(grid)]
    return Case(folder, command, result, whole, may_refuse=may_refuse)


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
