"""The commands that `beside_training.py` hurts, and digests of what they write."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINING = {
    "train_micro_batch_size_per_gpu": 2, "train_iters": 1_000_000, "save_interval": 50,
    "keep_last_n_checkpoints": 2,
}  # fmt: skip
"""Of the training run beside the commands: it never ends by itself."""


@dataclass(frozen=True)
class Command:
    """A command to hurt.

    Attributes:
        name: `sweep`, `suite`, `suite of the live run`, `prepare` or `import`.
        line: Its command line without the interpreter.
        target: The folder that it writes.
        digest: Returns a digest of all results in `target`; raises where they are not whole.
        refusal: What the command says if it is given again after it has ended well.
    """

    name: str
    line: list[str]
    target: Path
    digest: Callable[[Path], str]
    refusal: str = ""

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *self.line], cwd=ROOT, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def hashed(folder: Path, *patterns: str) -> str:
    """Return a SHA-256 of the names and contents of files in `folder`; there must be some."""
    hasher = hashlib.sha256()
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    assert paths, f"{folder} has no {patterns}"
    for path in paths:
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


def weights(run: Path) -> str:
    from tests.helpers.jobs import digest

    return str(sorted(digest(run).items()))


def swept(folder: Path) -> str:
    """Digest a grid folder: weights, metrics and results of each cell."""
    import pandas as pd

    from tests.helpers.jobs import all_but_speed

    assert set(pd.read_csv(folder / "cells.csv")["state"]) == {"finished"}
    cells = sorted(path.parent for path in folder.glob("*/cell.json"))
    parts = [weights(cell) + str(all_but_speed(cell)) for cell in cells]
    return hashlib.sha256("".join(parts).encode()).hexdigest() + hashed(
        folder, "*/extrapolation.csv"
    )


def live_suite(folder: Path) -> str:
    """The live run moves on, so only the report's presence and form are compared."""
    report = json.loads((folder / "report.json").read_text())
    return " ".join(sorted(report["measures"]))


def commands(folder: Path) -> list[Command]:
    """Write what the commands read, and return the commands."""
    import yaml

    from tests.helpers.archives import texts, write_jsonl
    from tests.helpers.hub import hub_model, write_tokenizer
    from tests.helpers.jobs import BASE, write_config, write_shards

    disk, sources = folder / "disk", folder / "sources"
    if not sources.exists():
        made = folder / "sources.made"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        write_shards(made, 200)
        write_jsonl(made / "texts.jsonl", texts(20_000))
        hub_model("llama").save_pretrained(made / "llama")
        write_tokenizer(made / "llama")
        made.rename(sources)
    text = str(sources / "text_document")
    live = write_config(folder / "live.yml", text, save=str(folder / "live"),
                        load=str(folder / "live"), **TRAINING)  # fmt: skip
    done = write_config(folder / "done.yml", text, save=str(folder / "done"),
                        train_micro_batch_size_per_gpu=2)  # fmt: skip
    (folder / "base.yml").write_text(yaml.safe_dump(BASE | {"data_path": text}))
    grid = {
        "runs": str(disk / "grid"), "configs": [str(folder / "base.yml")], "seeds": [1],
        "overrides": {"pos_emb": "{embedding}", "train_iters": 30, "log_interval": 1,
                      "eval_iters": 0, "save_interval": 5,
                      "train_micro_batch_size_per_gpu": 4, "eval_tokens": 64},
        "axes": {"embedding": ["kerple_log", "rotary"]}, "lengths": [16, 32],
        "compare": "kerple_log", "endpoints": {},
    }  # fmt: skip
    (folder / "grid.yml").write_text(yaml.safe_dump(grid))
    suite = ["--suite", "--lengths", "16,32", "-o", "eval_suite_tokens=256"]
    measure = ["evaluate.py", str(done), "--load", str(folder / "done"), *suite]
    measure_live = ["evaluate.py", str(live), "--load", str(folder / "live"), *suite]
    shards = ["--input", str(sources / "texts.jsonl"), "--name", "made", "-d", str(disk / "data")]
    imported = ["tools/import_hf.py", str(sources / "llama"), str(disk / "run")]
    return [
        Command("sweep", ["tools/sweep.py", str(folder / "grid.yml")], disk / "grid", swept),
        Command("suite", [*measure, "--out", str(disk / "suite")], disk / "suite",
                lambda out: hashed(out, "**/*.csv")),
        Command("suite of the live run", [*measure_live, "--out", str(disk / "live")],
                disk / "live", live_suite),
        Command("prepare", ["prepare_data.py", *shards, "--checkpoint-seconds", "0"],
                disk / "data", lambda out: hashed(out, "**/*.bin", "**/*.idx"), "--overwrite"),
        Command("import", imported, disk / "run",
                lambda run: weights(run) + hashed(run, "config.yml"), "is not empty"),
    ]  # fmt: skip
