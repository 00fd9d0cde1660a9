"""Compute digests of training results, to show that a change of the code does not change them.

    python tests/distributed/digests.py --out before.json            # before the change
    python tests/distributed/digests.py --compare before.json        # after it, on the same machine

Trains the quickstart for 100 steps, resumes a run at step 20, and trains the covering set of
layouts. A digest covers every number in `metrics.jsonl` (except times, speeds and memory) and every
tensor in the checkpoint. Takes about two minutes on two cores. Exit code 1 if a digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributed.matrix import all_cells, covering, train_all
from tests.helpers.jobs import digest, rewind, write_shards
from tests.helpers.paths import ROOT

MEASURED = ("tokens_per_second", "tflops", "memory_gb", "mfu", "second", "time")
"""Parts of the names of metrics that depend on the machine's load, not on the computation."""


def main() -> int:
    """Print the digests, and write them to a file or compare them with a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the digests to this JSON file")
    parser.add_argument("--compare", type=Path, help="a JSON file written by --out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = quickstart(Path(folder)) | layouts(Path(folder))
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if not args.compare:
        return 0
    before = json.loads(args.compare.read_text())
    differing = [name for name in before if before[name] != found.get(name)]
    print("differing: " + ", ".join(differing) if differing else "identical")
    return int(bool(differing))


def quickstart(folder: Path) -> dict[str, str]:
    """Return digests of 100 steps of the quickstart, and of a run that is resumed at step 20."""
    first = _train(folder, "first", exit_interval=100, save_interval=100)
    whole = _train(folder, "whole", exit_interval=40, save_interval=20)
    rewind(whole, folder / "resumed", 20)
    resumed = _train(folder, "resumed", exit_interval=40, save_interval=20)
    return {"quickstart": _of_run(first), "resumed": _of_run(resumed)}


def layouts(folder: Path) -> dict[str, str]:
    """Return digests of a few layouts that cover all pairs of settings, and of their references."""
    cells = covering(all_cells(ranks=4, largest=2))
    runs = {each.name: each for each in [*cells, *(cell.truth for cell in cells)]}
    train_all(folder, write_shards(folder), runs.values())
    return {name: _of_run(folder / name) for name in sorted(runs)}


def _train(folder: Path, name: str, **values: int) -> Path:
    keys = {"save": folder / name, "load": folder / name, "data_dir": folder / "data"}
    options = {**keys, **values, "log_interval": 1}
    command = [sys.executable, "train.py", "configs/quickstart.yml"]
    for key, value in options.items():
        command += ["-o", f"{key}={value}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    return folder / name


def _of_run(run: Path) -> str:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {k: v for k, v in row.items() if not any(word in k for word in MEASURED)} for row in lines
    ]
    text = json.dumps([rows, digest(run)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
