"""Compare the memory that `train.py --plan` predicts with what training allocates, on a CPU.

    python benchmarks/plan_memory.py --out benchmarks/results/plan_memory

A model of 92 million parameters takes two steps in each layout. Every tensor that exists is
counted, on each rank; the largest number is compared with the plan. The table goes to OUT.md, a
picture to OUT.png, and the numbers to OUT.json, where rows of other layouts stay. With `--plan`,
nothing is trained: the measured numbers stay, and the planned ones are computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.report import bars, picture
from megatron.files import write_text

MODEL = {
    "num_layers": 6, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 256,
    "make_vocab_size_divisible_by": 8192, "no_weight_tying": True, "pos_emb": "kerple_log",
    "data_path": "builtin:python-stdlib", "train_micro_batch_size_per_gpu": 2, "train_iters": 2,
    "eval_iters": 0, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
}  # fmt: skip
BUCKET = 50_000_000  # of numbers; DeepSpeed's default would hide the rest
LONG = {"seq_length": 512, "train_micro_batch_size_per_gpu": 4}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # name: ranks, ZeRO stage, other keys
    "1 rank, ZeRO-0": (1, 0, {}),
    "1 rank, ZeRO-1, bf16": (1, 1, {"precision": "bf16"}),
    "1 rank, ZeRO-1, checkpointed": (1, 1, {"checkpoint_activations": True}),
    "2 data, ZeRO-0": (2, 0, {}),
    "2 data, ZeRO-1": (2, 1, {}),
    "2 data, ZeRO-2": (2, 2, {}),
    "2 data, ZeRO-3": (2, 3, {}),
    "2 tensor, ZeRO-1": (2, 1, {"model_parallel_size": 2}),
    "2 stages, ZeRO-1, 3 micro-batches": (
        2, 1, {"pipe_parallel_size": 2, "gradient_accumulation_steps": 3}
    ),
    "2 stages, 3 micro-batches of 2,048 tokens": (
        2, 1, {"pipe_parallel_size": 2, "gradient_accumulation_steps": 3} | LONG
    ),
    "the same, checkpointed": (
        2, 1, {"pipe_parallel_size": 2, "gradient_accumulation_steps": 3,
               "checkpoint_activations": True} | LONG
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="How exact is the plan of a run's memory?")
    parser.add_argument("--out", type=Path, required=True, help="OUT.json, .md and .png")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], metavar="NAME")
    parser.add_argument("--plan", action="store_true", help="only plan again")
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)  # one rank of one layout
    args = parser.parse_args()
    if args.config:
        measure(args.config, args.out)
        return
    path = args.out.with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    for name in args.layouts:
        found["rows"][name] = row(name, found["rows"].get(name) if args.plan else None)
        print(f"{name}: {found['rows'][name]}", flush=True)
        if not args.plan:
            machine = f"{os.cpu_count()} cores, no GPU, torch {torch.__version__}"
            found |= {"machine": f"{machine}, {platform.machine()}", "date": str(date.today())}
        write_text(path, json.dumps(found, indent=1) + "\n")
        write_text(args.out.with_suffix(".md"), table(found))
    picture(args.out.with_suffix(".png"), title(found), lambda figure: draw(found["rows"], figure))


def row(name: str, known: dict[str, float] | None) -> dict[str, float]:
    """Return a layout's row of the table. Train in new processes, unless the row is known."""
    from megatron.config import load_config
    from megatron.engine.build import tokenizer_of
    from megatron.plan.memory import peak_of

    ranks, stage, keys = LAYOUTS[name]
    zero = {"stage": stage, "reduce_bucket_size": BUCKET}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yml")
        config.write_text(yaml.safe_dump(MODEL | {"zero_optimization": zero} | keys))
        if known is None:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={ranks}", __file__, "--out", folder, "--config"]
            subprocess.run([*command, str(config)], check=True, stdout=subprocess.DEVNULL)
            found = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
            assert len(found) == ranks
            known = {key: max(each[key] for each in found) for key in ("measured", "resident")}
        loaded = load_config([config], world_size=ranks)
    step, memory = peak_of(loaded, tokenizer_of(loaded).vocab_size, "cpu")
    planned = round(sum(memory.values()))
    changed = {"planned": planned, "ratio": round(planned / known["measured"], 3)}
    return known | {"parameters": step.size} | changed


def measure(config: Path, folder: Path) -> None:
    """Train as one rank, and write the largest number of bytes that tensors had."""
    from megatron import launcher
    from megatron.config import load_config
    from megatron.engine.job.join import joined_job
    from megatron.plan.live_tensors import LiveBytes
    from megatron.pretraining.run import Job

    launcher.join()
    os.chdir(folder)
    loaded = load_config([config], world_size=launcher.world_size())
    with joined_job(loaded.parallel) as groups:
        before = _resident("VmRSS")
        with LiveBytes("cpu") as live:
            Job(loaded, groups).run()
        found = {"measured": live.peak, "resident": _resident("VmHWM") - before}
        (folder / f"rank{groups.rank}.json").write_text(json.dumps(found))


def _resident(name: str) -> int:
    """Return a number of /proc/self/status in bytes: VmRSS now, or VmHWM, the largest VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def table(found: dict[str, Any]) -> str:
    """Return the rows as Markdown, in MB (10^6 bytes)."""
    lines = [
        f"Planned and measured memory of the fullest rank in MB. {found['machine']},",
        f"{found['date']}, `python benchmarks/plan_memory.py --out OUT`.",
        "Resident is the growth of the process, in which freed memory may stay.",
        "",
        "| layout | parameters of the rank | planned | measured | planned / measured | resident |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in found["rows"].items():
        planned, measured, resident = (r[key] / 1e6 for key in ("planned", "measured", "resident"))
        lines.append(
            f"| {name} | {r['parameters']:,} | {planned:,.0f} | {measured:,.0f} | "
            f"{r['ratio']:.3f} | {resident:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def title(found: dict[str, Any]) -> str:
    """Return the title of the picture."""
    return f"Planned and measured memory\n{found['machine']}, {found['date']}"


def draw(rows: dict[str, dict[str, float]], figure: Any) -> None:
    """Draw the planned and the measured memory of each layout."""
    axes = figure.subplots()
    keys = "planned", "measured"
    values = {key: [row[key] / 1e6 for row in rows.values()] for key in keys}
    bars(axes, list(rows), values, "{:,.0f}")
    axes.set_xlabel("MB of tensors on the fullest rank")
    figure.legend(loc="outside lower center", ncols=2)


if __name__ == "__main__":
    main()
