"""Compare implementations of kerple_log on a CPU: the command `attention.py --device cpu`.

It needs only torch. The variants are:

- `published`: the operations of the released code, see `attention_variants`;
- `eager`, `blocked`: this project's backends;
- `sdpa, no bias`: torch's causal scaled_dot_product_attention without a distance kernel, which
  shows what attention costs without KERPLE;
- `blocked, N documents` and `blocked, window W`, if `--documents` and `--window` ask for them.

Each repetition runs every variant once, and the medians of the times are compared. The report also
has the ratios of the fastest repetitions, because other load on the machine slows code with many
short parallel loops most. Peak memory is what torch allocates during one call, including outputs
and gradients but not inputs. Accuracy is the largest error relative to float64 eager attention, as
a fraction of the largest true value. The reports are attention.json, .md and .png in `--out`.

Legend: B batch, H heads, T positions, E head size.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention_variants import published
from benchmarks.report import bars, picture, processor
from megatron.attention import attend
from megatron.positional import load

Call = Callable[[], Tensor]
POS = load("kerple_log")
BASE = "published"


def variants(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta_HN: Tensor,
    documents: int | None = None,
    window: int | None = None,
) -> dict[str, tuple[Call, tuple]]:
    """Return name -> (call, the tensors for which gradients are computed)."""
    scale = q.shape[-1] ** -0.5
    inputs = (q, k, v, theta_HN)

    def ours(backend: str, **limits: Any) -> Call:
        return lambda: attend(q, k, v, POS, theta_HN, scale=scale, backend=backend, **limits)

    limited = {}
    if documents:
        size = -(-q.shape[2] // documents)
        starts_BS = (torch.arange(q.shape[2]) // size * size).expand(len(q), -1)
        limited[f"blocked, {documents} documents"] = ours("blocked", starts_BS=starts_BS), inputs
    if window is not None:
        limited[f"blocked, window {window}"] = ours("blocked", window=window), inputs
    return {
        BASE: (lambda: published(*inputs), inputs),
        "eager": (ours("eager"), inputs),
        "blocked": (ours("blocked"), inputs),
        "sdpa, no bias": (
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (q, k, v),
        ),
        **limited,
    }


def make_inputs(batch: int, args: argparse.Namespace, dtype: torch.dtype) -> tuple[list, Tensor]:
    """Return ([q, k, v, theta], gradient of the output), with the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(1234)
    shape = batch, args.heads, args.length, args.head_size
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    theta_HN = POS.initial_theta(args.heads, generator).to(dtype)
    return [x.requires_grad_() for x in (q, k, v, theta_HN)], grad


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak number of bytes that a call has allocated and not yet freed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = call()  # kept alive, as a caller would
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    del result
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    live = peak = 0
    for event in memory:
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def measure(batch: int, args: argparse.Namespace) -> list[dict]:
    """Time every variant at one batch size, and return one row of the table for each."""
    inputs, grad = make_inputs(batch, args, torch.float32)
    table = variants(*inputs, documents=args.documents, window=args.window)
    forward: dict[str, list[float]] = {name: [] for name in table}
    both: dict[str, list[float]] = {name: [] for name in table}

    def forward_only(call: Call) -> None:
        with torch.no_grad():
            call()

    for repetition in range(args.warmup + args.repeats):
        for name, (call, wrt) in table.items():
            once = seconds(lambda call=call: forward_only(call))
            twice = seconds(lambda call=call, wrt=wrt: torch.autograd.grad(call(), wrt, grad))
            if repetition >= args.warmup:
                forward[name].append(once)
                both[name].append(twice)
    rows = []
    for name, (call, wrt) in table.items():
        peak = peak_bytes(lambda call=call, wrt=wrt: torch.autograd.grad(call(), wrt, grad))
        rows.append(
            {
                "batch": batch,
                "variant": name,
                "forward_ms": 1e3 * statistics.median(forward[name]),
                "forward_best_ms": 1e3 * min(forward[name]),
                "forward_backward_ms": 1e3 * statistics.median(both[name]),
                "forward_backward_best_ms": 1e3 * min(both[name]),
                "peak_mb": peak / 1e6,
            }
        )
    base = next(row for row in rows if row["variant"] == BASE)
    for row in rows:
        for key in [key for key in row if key.endswith(("_ms", "_mb"))]:
            row[key[:-3] + "_ratio"] = row[key] / base[key]
    return rows


def accuracy(args: argparse.Namespace) -> list[dict]:
    """Return one row per variant: the errors of the output and of each gradient.

    An error is the largest difference from float64, as a fraction of the largest true value.
    """
    inputs, grad = make_inputs(1, args, torch.float32)
    exact, exact_grad = make_inputs(1, args, torch.float64)
    reference = variants(*exact)
    rows = []
    for name, (call, wrt) in variants(*inputs).items():
        true_call, true_wrt = reference[name if name == "sdpa, no bias" else "eager"]
        got, true = call(), true_call()
        pairs = zip(
            (got, *torch.autograd.grad(got, wrt, grad)),
            (true, *torch.autograd.grad(true, true_wrt, exact_grad)),
            strict=True,
        )
        errors = [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]
        keys = ("out", "dq", "dk", "dv", "dtheta")
        rows.append({"variant": name} | dict(zip(keys, errors, strict=False)))
    return rows


def markdown(report: dict) -> str:
    s = report["setting"]
    lines = [
        f"# Attention on {s['device']}",
        "",
        f"T = {s['length']}, {s['heads']} heads of {s['head_size']}, fp32, causal, kerple_log; "
        f"{s['threads']} threads, torch {s['torch']}, {s['processor']}; medians of "
        f"{s['repeats']} interleaved repetitions. Ratios are to `{BASE}` in the same run, in "
        "brackets those of the fastest repetitions.",
        "",
        "| B | variant | forward ms | ratio (best) | forward + backward ms | ratio (best) "
        "| peak MB | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in report["timings"]:
        lines.append(
            f"| {r['batch']} | {r['variant']} "
            f"| {r['forward_ms']:.1f} | {r['forward_ratio']:.2f} ({r['forward_best_ratio']:.2f}) "
            f"| {r['forward_backward_ms']:.1f} | {r['forward_backward_ratio']:.2f} "
            f"({r['forward_backward_best_ratio']:.2f}) "
            f"| {r['peak_mb']:.0f} | {r['peak_ratio']:.2f} |"
        )
    lines += [
        "",
        "Largest error against float64, relative to the largest true value (B = 1):",
        "",
        "| variant | out | dq | dk | dv | dtheta |",
        "|---|---|---|---|---|---|",
    ]
    for r in report["accuracy"]:
        values = [r.get(key) for key in ("out", "dq", "dk", "dv", "dtheta")]
        cells = ["-" if value is None else f"{value:.1e}" for value in values]
        lines.append(f"| {r['variant']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> None:
    """Measure everything, then write both reports."""
    torch.set_num_threads(args.threads)
    report = {
        "setting": {
            "device": args.device,
            "processor": processor(),
            "date": str(datetime.date.today()),
            "torch": torch.__version__,
            "threads": args.threads,
            "length": args.length,
            "heads": args.heads,
            "head_size": args.head_size,
            "repeats": args.repeats,
        },
        "timings": [row for batch in args.batches for row in measure(batch, args)],
        "accuracy": accuracy(args),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "attention.md").write_text(markdown(report))
    picture(args.out / "attention.png", title(report), lambda figure: draw(report, figure), 6.0)
    print(markdown(report))


def title(report: dict) -> str:
    """Return the title of the picture."""
    s = report["setting"]
    return (
        f"Attention with kerple_log, {s['length']:,} tokens, {s['heads']} heads of "
        f"{s['head_size']}, fp32\n{s['processor']}, {s['threads']} threads, torch {s['torch']}"
        + (f", {s['date']}" if "date" in s else "")
    )


def draw(report: dict, figure: Any) -> None:
    """Draw each variant's time and memory relative to the published code, for each batch size."""
    names = {
        "forward_ratio": "forward",
        "forward_backward_ratio": "forward and backward",
        "peak_ratio": "peak memory",
    }
    batches = sorted({row["batch"] for row in report["timings"]})
    for axes, batch in zip(
        figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True
    ):
        rows = [row for row in report["timings"] if row["batch"] == batch]
        values = {name: [row[key] for row in rows] for key, name in names.items()}
        bars(axes, [row["variant"] for row in rows], values, "{:.2f}")
        axes.set_xlabel(f"batch {batch}: ratio to `{BASE}`")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
