"""Run small training jobs inside one process group, and read the files that they write."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from megatron.config import load_config
from megatron.engine.checkpoint.checksums import describe_files, write_record
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.parallel.groups import Groups, build_groups
from megatron.pretraining.run import Job
from tests.helpers.shards import write_documents

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")
MEASURED = "distance_scale,split,step,code,eval_tokens,eval_sequences"
"""The last columns of a table of results."""

BASE = {
    "tokenizer_type": "ByteLevelTokenizer",
    "make_vocab_size_divisible_by": 8,
    "split": "80,10,10",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "pos_emb": "kerple_log",
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "lr_decay_style": "cosine",
    "warmup": 0.2,
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "train_iters": 6,
    "log_interval": 1,
    "eval_interval": 4,
    "eval_iters": 2,
}


def write_shards(folder: Path, documents: int = 60) -> str:
    """Write token shards of a text with something to learn, and return their prefix."""
    rng = np.random.default_rng(7)
    prefix = folder / "text_document"
    words = (rng.integers(97, 123, rng.integers(3, 9)) for _ in range(documents))
    repeated = (np.append(np.tile(word, rng.integers(5, 30)), 256) for word in words)
    write_documents(prefix, repeated)
    return str(prefix)


def write_config(path: Path, prefix: str, **changes: Any) -> Path:
    """Write the config `BASE` with `changes` to a YAML file."""
    values = BASE | {"data_path": prefix} | changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def write_run_config(folder: Path, prefix: str, **changes: Any) -> tuple[Path, Path]:
    """Write the config of a run that saves and resumes in `folder/run`; return config and run."""
    run = folder / "run"
    folders = {"save": str(run), "load": str(run)}
    return write_config(folder / "config.yml", prefix, **(folders | changes)), run


def cell(stage: int, precision: str) -> dict[str, Any]:
    """Return the config keys of one ZeRO stage and precision."""
    return {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }


def run_job(groups: Groups, config: Path) -> None:
    """Run one job in the current process group."""
    Job(load_config([config], world_size=groups.world_size), groups).run()


def rows(run: Path, name: str = "train/loss") -> dict[int, float]:
    """Return step -> value of a metric. The run may be writing: only whole lines are read."""
    whole, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")
    read = [json.loads(line) for line in whole.splitlines()]
    return {row["step"]: row[name] for row in read if name in row}


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without their two times, which each row must have."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("time") and row.pop("elapsed_seconds") >= 0 for row in rows)
    return rows


def all_but_speed(run: Path) -> list[str]:
    """The rows of metrics.jsonl to the last digit, without the numbers that may differ."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    speed = (
        r'"(train/((tokens|samples)_per_second|seconds_per_step|tflops_per_device|memory_gb)'
        r'|time|elapsed_seconds)": [^,}]*'
    )
    return [re.sub(speed, "", line) for line in lines]


def rewind(source: Path, target: Path, step: int) -> None:
    """Copy a run folder as it was just after the checkpoint of `step`."""
    shutil.copytree(source, target)
    (target / "latest").write_text(f"global_step{step}")
    for path in target.glob("global_step*"):
        if int(path.name[len("global_step") :]) > step:
            shutil.rmtree(path)


def seal_again(checkpoint: Path) -> None:
    """Record the files of a checkpoint as they are now, after a test has changed them."""
    record = json.loads((checkpoint / "kerple.json").read_text())
    kept = {name: value for name, value in record.items() if name not in ("files", "checksum")}
    files = describe_files(checkpoint, build_groups(torch.device("cpu")))
    write_record(checkpoint, kept, files)


def train_run(
    groups: Groups,
    run: Path,
    prefix: str,
    keys: dict[str, Any],
    *,
    source: Path | None = None,
    step: int = 0,
) -> None:
    """Train `run` with these config keys. A run with a `source` continues that run at `step`."""
    config = run.with_name(f"{run.name}.yml")
    if groups.is_main:
        if source:
            rewind(source, run, step)
        write_config(config, prefix, **keys, save=str(run), load=str(run))
    groups.barrier()
    run_job(groups, config)


def tensors_digest(path: Path) -> str:
    """Return a SHA-256 of all tensors and numbers in a file that `torch.save` wrote."""
    hasher = hashlib.sha256()
    _feed(hasher, torch.load(path, weights_only=False, map_location="cpu"))
    return hasher.hexdigest()


def digest(run: Path) -> dict[str, str]:
    """Return file name -> hash of all its tensors and numbers, for the newest checkpoint."""
    paths = sorted(newest(run).path.glob("*.pt"))
    return {path.name: tensors_digest(path) for path in paths}


IGNORED = ("ds_config", "ds_version", "param_slice_mappings", "overflow")
"""Entries that hold paths, versions, objects, or a flag that each step sets anew."""


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(str((value.dtype, tuple(value.shape))).encode())
        hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):  # a conversion loads the same entries in another order
            if key not in IGNORED:
                hasher.update(str(key).encode())
                _feed(hasher, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, bool | int | float | str | type(None)):
        hasher.update(repr(value).encode())


def measured(folder: Path) -> list[list[float]]:
    """Return the numbers in `extrapolation.csv`, one row for each length; last, the scale."""
    table = pd.read_csv(folder / "extrapolation.csv")
    settings = ["split", "step", "code", "eval_tokens", "eval_sequences"]
    return table.drop(columns=settings).to_numpy(float).tolist()
