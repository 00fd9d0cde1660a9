"""Compare the step time that `train.py --plan` estimates with the published speed of runs.

    python benchmarks/plan/plan_time.py              # writes planned_{runs,errors}.csv
    python docs/lab/lab_tables.py                    # writes them into docs/lab/published_runs.md
    python benchmarks/plan/plan_time.py --calibrate  # prints `Rates` that fit half of the runs

The machine needs no GPU, and the command takes about 5 minutes. Each row of
docs/lab/published_runs.csv becomes a config, which is planned as `--plan` does it. The calibration
minimises the mean square of log(measured / planned time), at most 0.35² for each run, over the rows
marked `calibration`, by steps of 1% to 20% of one value at a time. It never reads the other rows.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import pandas as pd

from megatron.config import Config, load_config
from megatron.engine.gpus import gpu_named
from megatron.engine.training.speed import keys_per_query
from megatron.files import write_text
from megatron.plan.step_time import CALIBRATED, Cluster, Rates, StepTime, step_time

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs/lab/published_runs.csv"
TABLES = RUNS.parent / "tables"
Row = dict[str, str]
Planned = Callable[[Rates], StepTime]
MISS = 0.35
"""Runs that miss by more count as this, so that a few very slow runs do not move the others."""
LAYOUT = {
    "run": "run", "GPUs": "gpus", "kind": "gpu", "tensor": "tp", "stages": "pp", "data": "dp",
    "ZeRO": "zero", "micro-batch": "micro_batch", "recomputed": "recompute",
}  # fmt: skip
"""Maps columns of the table to columns of published_runs.csv."""
FIT = [f.name for f in fields(Rates) if f.name != "interval"]


def runs() -> list[Row]:
    """Return the published runs."""
    with RUNS.open() as file:
        return list(csv.DictReader(file))


def config_of(row: Row) -> Config:
    """Return the config of a run in this project. Attention is fused, as with FlashAttention."""
    tp, stages = int(row["tp"]), int(row["pp"])
    zero = max(int(row["zero"]), int(stages > 1))  # a pipeline has ZeRO-1 here, with equal bytes
    keys: dict[str, Any] = {
        "num_layers": row["layers"], "hidden_size": row["hidden"],
        "num_attention_heads": row["heads"], "num_kv_heads": row["kv_heads"],
        "seq_length": row["sequence"], "max_position_embeddings": row["sequence"],
        "intermediate_size": int(row["mlp"]) * (3 if row["gated"] == "1" else 1),
        "activation": "swiglu" if row["gated"] == "1" else "gelu",
        "pos_emb": "rotary", "no_weight_tying": "true", "make_vocab_size_divisible_by": 1,
        "model_parallel_size": tp, "pipe_parallel_size": stages,
        "zero_optimization.stage": zero,
        "train_micro_batch_size_per_gpu": row["micro_batch"],
        "train_batch_size": row["global_batch"],
        "checkpoint_activations": str(row["recompute"] == "full").lower(),
        "precision": "fp16",  # as fast as bf16
        "train_iters": 1, "optimizer.params.lr": 1e-4, "data_path": "none",
    }  # fmt: skip
    if row["overlap"] == "1":
        keys["zero_optimization.overlap_comm"] = "true"
    return load_config([], [f"{k}={v}" for k, v in keys.items()], world_size=int(row["gpus"]))


def planned(row: Row) -> Planned:
    """Return the function from rates to the planned time of the run's step."""
    from megatron.engine.build import plan_of
    from megatron.plan.memory import peak_of

    config, vocabulary = config_of(row), int(row["vocab"])
    step, _ = peak_of(config, vocabulary)
    shape = plan_of(config, vocabulary, device_type="cuda", eod=0).shape
    gpu = gpu_named(row["gpu"])
    network = float(row["network_gbps"] or gpu.network)
    cluster = Cluster(gpu, int(row["gpus_per_node"]), network)
    keys = keys_per_query(config)
    return lambda rates: step_time(config, step, shape, keys, cluster, rates)


def measured(row: Row) -> float:
    """Return the published seconds of a step."""
    value, unit, gpus = float(row["value"]), row["unit"], int(row["gpus"])
    layers, h, s = (int(row[key]) for key in ("layers", "hidden", "sequence"))
    tokens = int(row["global_batch"]) * s
    if unit.startswith("GPU hours/"):
        return value * 3600 / gpus / int(unit.split("/")[1].split()[0])
    if unit == "TFLOP/s/GPU with recomputation":  # arXiv 2104.04473, equation 3
        flop = 96 * tokens * layers * h * h
        flop *= 1 + s / (6 * h) + int(row["vocab"]) / (16 * layers * h)
        return flop / gpus / value / 1e12
    return {"s/step": value, "tokens/s": tokens / value, "tokens/s/GPU": tokens / value / gpus}[
        unit
    ]


def calibrated(rows: list[tuple[Row, Planned]]) -> Rates:
    """Return the rates that fit the calibration rows best, from today's on."""
    known = [(measured(row), plan) for row, plan in rows if row["split"] == "calibration"]

    def error(rates: Rates) -> float:
        return fmean(min(math.log(s / plan(rates).total) ** 2, MISS**2) for s, plan in known)

    best = (error(CALIBRATED), CALIBRATED)
    for step in (1.2, 1.05, 1.01) * 3:
        improved = True
        while improved:
            improved = False
            for name in FIT:
                for factor in (step, 1 / step):
                    value = getattr(best[1], name) * factor
                    tried = replace(
                        best[1], **{name: value if name == "moves" else min(value, 1.0)}
                    )
                    if (found := error(tried)) < best[0] - 1e-9:
                        best, improved = (found, tried), True
    ratios = [seconds / plan(best[1]).total for seconds, plan in known]
    tenths = quantiles(ratios, n=10, method="inclusive")
    rounded = {name: round(getattr(best[1], name), 3) for name in FIT}
    return Rates(**rounded, interval=(round(tenths[0], 2), round(tenths[-1], 2)))


def errors(rows: list[tuple[Row, Planned]], split: str) -> list[float]:
    """Return |planned / measured - 1| of the rows of a split."""
    own = [(measured(row), plan(CALIBRATED).total) for row, plan in rows if row["split"] == split]
    return [abs(time / seconds - 1) for seconds, time in own]


def columns_of(row: Row, plan: Planned) -> Row:
    """Return a run's row of the table."""
    time, seconds, (low, high) = plan(CALIBRATED), measured(row), CALIBRATED.interval
    total = time.total
    shares = {"compute": time.compute, "bubble": time.bubble, "exposed": time.exposed}
    return {
        **{title: row[column] for title, column in LAYOUT.items()},
        "published s": f"{seconds:.3g}",
        "planned s": f"{total:.3g}",
        "interval": f"{low * total:.3g} to {high * total:.3g}",
        "error": f"{100 * (total / seconds - 1):+.0f}%",
        **{title: f"{100 * share / total:.0f}" for title, share in shares.items()},
        "rows": row["split"],
    }


def summary(rows: list[tuple[Row, Planned]]) -> list[Row]:
    """Return a row of errors for each split."""
    low, high = CALIBRATED.interval
    lines = []
    for split in ("calibration", "held-out"):
        found = errors(rows, split)
        ratios = [measured(r) / p(CALIBRATED).total for r, p in rows if r["split"] == split]
        lines.append({
            "rows": split,
            "runs": str(len(found)),
            "median error": f"{median(found):.1%}",
            "largest error": f"{max(found):.1%}",
            "within the interval": str(sum(low <= ratio <= high for ratio in ratios)),
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="How exact is the plan of a step's time?")
    parser.add_argument("--calibrate", action="store_true", help="print rates that fit")
    args = parser.parse_args()
    rows = [(row, planned(row)) for row in runs()]
    if args.calibrate:
        print(calibrated(rows))
    else:
        planned_runs = [columns_of(*each) for each in rows]
        write_text(TABLES / "planned_runs.csv", pd.DataFrame(planned_runs).to_csv(index=False))
        write_text(TABLES / "planned_errors.csv", pd.DataFrame(summary(rows)).to_csv(index=False))


if __name__ == "__main__":
    main()
