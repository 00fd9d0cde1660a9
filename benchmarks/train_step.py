"""Measure a training step: tokens per second, share of the matmul rate, memory, and its parts.

    python benchmarks/train_step.py --out benchmarks/results/train_step
    python benchmarks/train_step.py --width 512 --heads 8 --only project --out runs/wide
    python benchmarks/train_step.py --device cuda --layers 12 --width 768 --heads 12 --length 512 \\
        --batch 32 --vocab 50304 --precision bf16 --out benchmarks/results/train_step_gpu

All steps are of one shape, on random tokens, with fused AdamW and clipping at 1.0:

- `project`: the step of `train.py`, with `kerple_log` (needs deepspeed);
- `project, compiled`: the same with the key `torch_compile`;
- `project, CUDA graphs`: the latter with `torch_compile_mode: reduce-overhead`, on a GPU only;
- `project, plain loop`: the same model without DeepSpeed (needs torch, and on a GPU triton), and
  `project, plain loop, compiled`;
- `plain`: a plain GPT without a distance kernel, see `plain_gpt`; `plain, compiled` is that under
  `torch.compile`;
- `plain, our settings`: the plain GPT with the settings of `megatron/cpu_settings.py` (CPU only);
- `published`: the plain GPT with the operations of the released KERPLE code in attention.

Each variant has a process, in the environment that it would have in use: `project` and `plain, our
settings` are set up as by `train.py`, and nothing is set for the others. The processes start one
after another, so that each finds the machine idle. Each round runs every variant for some steps.
The medians of the rounds are compared. The matmul rate is that of a large matrix product in the
same precision. The breakdown is one of torch's profiler; its parts are times of operations, and the
rest is Python and the engine. The reports are train_step.json, .md and .png in `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import picture, processor
from benchmarks.train_step_worker import DTYPES, matmul_tflops

ROOT = Path(__file__).resolve().parents[1]
PROJECT, COMPILED, GRAPHS = "project", "project, compiled", "project, CUDA graphs"
LOOP, LOOP_COMPILED = "project, plain loop", "project, plain loop, compiled"
PLAIN, PLAIN_COMPILED, PUBLISHED = "plain", "plain, compiled", "published"
PLAIN_SET = "plain, our settings"
# device -> (variant, yardstick, smallest ratio of their tokens per second)
GOALS = {
    "cpu": [(PROJECT, PLAIN, 1.2), (PROJECT, PUBLISHED, 1.4), (COMPILED, PLAIN_COMPILED, 1.0)],
    "cuda": [(LOOP, PUBLISHED, 4.0), (LOOP, PLAIN, 0.97), (LOOP_COMPILED, PLAIN_COMPILED, 1.0)],
}


def main() -> None:
    args = arguments().parse_args()
    names = [PROJECT, COMPILED, GRAPHS] if find_spec("deepspeed") else []
    names += [LOOP, LOOP_COMPILED, PLAIN, PLAIN_SET, PLAIN_COMPILED, PUBLISHED]
    other = GRAPHS if args.device == "cpu" else PLAIN_SET
    names = [name for name in names if name != other]
    if unknown := set(args.only or ()) - set(names):
        sys.exit(f"--only: {'; '.join(unknown)} cannot be measured here; known: {'; '.join(names)}")
    names = [name for name in names if not args.only or name in args.only]
    torch.set_num_threads(args.threads)
    report = {"setting": setting(args), "matmul_tflops": matmul_tflops(args), "rows": []}
    workers = {name: Worker(name, args) for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for done in range(args.rounds + 1):  # the first round compiles and warms up
        for name, worker in workers.items():
            rate = worker.ask("round")
            rates[name] += [rate] if done else []
        print(f"round {done} of {args.rounds}", flush=True)
    for name, worker in workers.items():
        rate = statistics.median(rates[name])
        tflops = rate * flops_per_token(args) / 1e12
        found = {"tokens_per_second": rate, "rounds": rates[name], "tflops": tflops}
        share = tflops / report["matmul_tflops"]
        report["rows"].append(
            {"variant": name, **found, "share_of_matmul": share, **worker.ask("profile")}
        )
        worker.end()
    write(report, args.out)


class Worker:
    """A process that takes the steps of one variant, when it is asked to.

    It is ready when it has been made, because how its threads wait depends on the load of the
    machine at its start (`megatron/cpu_settings.py`): a start beside another worker would count as
    a busy machine.
    """

    def __init__(self, variant: str, args: argparse.Namespace):
        values = {k: v for k, v in vars(args).items() if k not in ("out", "only")}
        command = [sys.executable, "-m", "benchmarks.train_step_worker"]
        self.process = subprocess.Popen(
            [*command, json.dumps({"variant": variant} | values)],
            cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def ask(self, command: str) -> Any:
        """Return the worker's answer to a command of `train_step_worker`."""
        print(command, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else sys.exit("a worker has ended: see its error above")

    def end(self) -> None:
        self.process.communicate()


def arguments() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="How fast is a training step, and why")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--out", type=Path, required=True, help="folder for the reports")
    found.add_argument("--only", nargs="+", help="these variants only")
    found.add_argument("--layers", type=int, default=4)
    found.add_argument("--width", type=int, default=128)
    found.add_argument("--heads", type=int, default=4)
    found.add_argument("--length", type=int, default=128)
    found.add_argument("--batch", type=int, default=16, help="sequences of a step")
    found.add_argument("--vocab", type=int, default=1024)
    found.add_argument("--precision", choices=[*DTYPES], default="fp32")
    found.add_argument("--threads", type=int, default=2, help="of a CPU")
    found.add_argument("--rounds", type=int, default=9)
    found.add_argument("--steps", type=int, default=10, help="of each variant in a round")
    return found


def flops_per_token(args: argparse.Namespace) -> float:
    """Return the operations of one token, as `megatron/engine/training/speed.py` counts them."""
    weights = 12 * args.layers * args.width**2 + args.vocab * args.width
    return 6 * weights + 12 * args.layers * args.width * args.length


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments, the machine, the versions and the date of the run."""
    cuda = args.device == "cuda"
    chosen = {key: value for key, value in vars(args).items() if key not in ("out", "only")}
    return chosen | {
        "processor": torch.cuda.get_device_name() if cuda else processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "omp": {
            key: value
            for key, value in os.environ.items()
            if key.startswith(("OMP_", "GOMP_", "KMP_"))
        },
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def markdown(report: dict) -> str:
    """Return the table of the variants, the goals and the breakdown."""
    s, rows = report["setting"], {row["variant"]: row for row in report["rows"]}
    threads = f"{s['threads']} threads, " if s["device"] == "cpu" else ""
    lines = [
        f"# A training step on {s['processor']}",
        "",
        f"{s['layers']} layers of width {s['width']}, {s['heads']} heads, {s['batch']} sequences "
        f"of {s['length']} tokens, vocabulary of {s['vocab']:,}, {s['precision']}; {threads}torch "
        f"{s['torch']}, Python {s['python']}, {s['date']}. Medians of {s['rounds']} interleaved "
        f"rounds of {s['steps']} steps. A large matrix product reaches "
        f"{report['matmul_tflops']:.3g} TFLOP/s.",
        "",
        "| variant | tokens/s | / plain | share of the matmul rate | peak MB | CPU ms / step "
        "| page faults / step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    plain = rows.get(PLAIN, {}).get("tokens_per_second")
    for row in report["rows"]:
        ratio = f"{row['tokens_per_second'] / plain:.2f}" if plain else "-"
        lines.append(
            f"| {row['variant']} | {row['tokens_per_second']:,.0f} | {ratio} "
            f"| {row['share_of_matmul']:.0%} | {row['peak_mb']:,.0f} "
            f"| {row['cpu_ms']:,.0f} | {row['page_faults']:,.0f} |"
        )
    if s["device"] == "cpu":
        alike = defaultdict(list)
        for row in report["rows"]:
            alike[row["waiting"]].append(f"`{row['variant']}`")
        lines += ["", "How threads wait:", ""]
        lines += [f"- {', '.join(names)}: {waiting}" for waiting, names in alike.items()]
    lines += ["", "| goal | at least | measured |", "|---|---:|---:|"]
    for mine, other, least in GOALS[s["device"]]:
        if mine in rows and other in rows:
            ratio = rows[mine]["tokens_per_second"] / rows[other]["tokens_per_second"]
            lines.append(f"| {mine} / {other}, tokens per second | {least} | {ratio:.2f} |")
    parts = sorted({part for row in report["rows"] for part in row["parts"]})
    lines += ["", "Share of the time of a step, under torch's profiler:", ""]
    lines += [f"| variant | {' | '.join(parts)} |", "|---|" + "---:|" * len(parts)]
    for row in report["rows"]:
        cells = " | ".join(f"{row['parts'].get(part, 0):.0%}" for part in parts)
        lines.append(f"| {row['variant']} | {cells} |")
    return "\n".join(lines) + "\n"


def write(report: dict, folder: Path) -> None:
    """Write train_step.json, train_step.md and train_step.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_step.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "train_step.md").write_text(markdown(report))
    print(markdown(report))
    picture(folder / "train_step.png", title(report), lambda figure: draw(report, figure), 5.0)


def title(report: dict) -> str:
    """Return the title of the picture."""
    s = report["setting"]
    return (
        f"A training step: {s['layers']} layers of width {s['width']}, {s['batch']} sequences of "
        f"{s['length']} tokens, {s['precision']}\n{s['processor']}, torch {s['torch']}, {s['date']}"
    )


def draw(report: dict, figure: Any) -> None:
    """Draw the seconds of a million tokens of each variant, divided into parts."""
    rows = report["rows"]
    names, left = [row["variant"] for row in rows], [0.0] * len(rows)
    axes = figure.subplots()
    for part in sorted({part for row in rows for part in row["parts"]}):
        widths = [1e6 / r["tokens_per_second"] * r["parts"].get(part, 0) for r in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds for a million tokens")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4)


if __name__ == "__main__":
    main()
