"""Compare implementations of attention on a GPU: the command `attention.py --device cuda`.

First the accuracy of each variant (see `attention_variants`) is measured. It is the largest error
relative to eager attention in float64, as a fraction of the largest true value.

Then the variants are timed in groups. A group has one head size and one sequence length, and the
batch size that keeps the number of tokens constant. The most important groups are timed first:
lengths with goals, then other lengths, then other head sizes. FlexAttention compiles slowly, so
where it has no goal it is timed last. Within a group, each repetition runs every variant once, and
the medians of the GPU's time are compared. `attention_clock` describes a measurement. The report
lists what was not measured, with the reason: out of memory, refused, or past `--minutes`.

attention_gpu.json and .md are rewritten after each group, so an interrupted run keeps its results.
The plot attention_gpu.png needs matplotlib.

The forward pass counts as 4 B H E T (T + 1) / 2 FLOP. Forward and backward count as 3.5 times that.

Legend: B batch, H heads, T positions, E head size.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from benchmarks.attention_clock import Clock, broken, reason, tidy
from benchmarks.attention_report import GOALS, write
from benchmarks.attention_variants import Variant, make_inputs, published_constants, variants
from megatron.attention import attend, flex

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RESULTS = ("out", "dq", "dk", "dv", "dtheta")
MILLISECONDS = 400.0
"""The time for all repetitions of one variant in a group, with or without the backward pass."""
FEWEST = 3
SLOW = 1000.0
"""A variant that takes longer than this (in milliseconds) is timed only once."""


@dataclass(frozen=True)
class Group:
    """Variants that are timed together."""

    head_size: int
    length: int
    names: tuple[str, ...]


def plan(args: argparse.Namespace) -> list[Group]:
    """Return the groups to measure, the most important first."""
    every = variants()
    names = [n for n in every if not args.only or any(part in n for part in args.only)]
    plain = tuple(name for name in names if not every[name].is_flex)
    flexes = [name for name in names if every[name].is_flex]
    lengths, first = sorted(args.lengths), args.head_sizes[0]
    if args.quick:
        lengths = [t for t in lengths if t in (512, 2048)] or lengths[:2]
        return [Group(first, length, plain) for length in lengths]
    goals = [length for length in lengths if length in GOALS]
    rest = [length for length in lengths if length not in GOALS]
    groups = [Group(first, length, tuple(names)) for length in goals]
    groups += [Group(first, length, plain) for length in rest]
    groups += [Group(size, length, plain) for size in args.head_sizes[1:] for length in lengths]
    if flexes:
        with_partner = tuple(n for n in names if n in ("fused kerple_log", *flexes))
        groups += [Group(first, length, with_partner) for length in rest]
    return groups


def run(args: argparse.Namespace) -> None:
    """Measure the accuracy and the times of all variants, and write the reports."""
    device = device_of(args)
    clock = Clock(device)
    report = {"setting": setting(args, device), "accuracy": [], "timings": [], "skipped": []}
    report["setting"]["matmul_tflops"] = clock.matmul_tflops()
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    dtype, groups = DTYPES[args.dtype], plan(args)
    names = {name for group in groups for name in group.names}
    names = sorted(names, key=lambda name: (variants()[name].is_flex, name))  # what may fail last
    report["accuracy"] = accuracy(
        *(names, groups[0], args.heads, args.tokens, dtype, device, report)
    )
    write(report, args.out)
    total, done = sum(len(group.names) for group in groups), 0
    for number, group in enumerate(groups):
        forget(device, compiled=number > 0)  # `accuracy` has compiled the first group's size
        measure(group, number, args, dtype, clock, deadline, report)
        done += len(group.names)
        write(report, args.out)
        spent = time.monotonic() - begun
        left = min(spent / done * (total - done), max(0.0, deadline - time.monotonic()))
        print(
            f"[{number + 1}/{len(groups)}] E={group.head_size} T={group.length}: "
            f"{spent:.0f} s, at most {left:.0f} s to go",
            flush=True,
        )
    print((args.out / "attention_gpu.md").read_text())


def forget(device: torch.device, compiled: bool = True) -> None:
    """Free what another length left in memory and, if `compiled`, what torch has compiled."""
    tidy(device)
    published_constants.cache_clear()
    flex.causal_mask.cache_clear()
    if compiled:
        torch._dynamo.reset()


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to run on, or exit with a message if it does not exist."""
    if args.device == "interpreter":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here; --device cpu compares what a CPU can run")
    return torch.device("cuda")


def setting(args: argparse.Namespace, device: torch.device) -> dict:
    """Return the facts of the run for its report: machine, versions, date and arguments."""
    cuda = device.type == "cuda"
    own = [part if not Path(part).is_absolute() else Path(part).name for part in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "Triton's interpreter",
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(datetime.date.today()),
        "command": " ".join(["python benchmarks/attention.py", *own]),
        "heads": args.heads,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "repeats": args.repeats,
    }


def measure(
    group: Group,
    number: int,
    args: argparse.Namespace,
    dtype: torch.dtype,
    clock: Clock,
    deadline: float,
    report: dict,
) -> None:
    """Time the variants of a group, and append their rows to `report`.

    Args:
        number: The number of the group, from 0.
        deadline: The value of `time.monotonic()` after which variants are skipped.
    """
    batch = max(1, args.tokens // group.length)
    shape = batch, args.heads, group.length, group.head_size
    where = {"group": number, "T": group.length, "B": batch, "E": group.head_size}

    def skip(name: str, what: str, why: str) -> None:
        report["skipped"].append(where | {"variant": name, "what": what, "why": why})

    if time.monotonic() > deadline:
        for name in group.names:
            skip(name, "all", f"not reached in {args.minutes:g} minutes")
        return
    inputs = make_inputs(shape, dtype, clock.device)
    calls, rows = {}, {}
    for name in group.names:
        if time.monotonic() > deadline:
            skip(name, "all", f"not reached in {args.minutes:g} minutes")
            continue
        variant = variants()[name]
        for what, function in (("forward", inputs.forward), ("forward_backward", inputs.both)):
            call = bound(function, variant)
            try:
                found = warm(call, clock, args.repeats, deadline)
            except Exception as error:  # refused, or too large: another variant may still do
                if broken(error):
                    write(report, args.out)
                    raise
                skip(name, what, reason(error))
                del error
                tidy(clock.device)
                continue
            calls[name, what] = call, *found
            rows.setdefault(name, where | {"variant": name})
    for (name, what), times in interleaved(calls, clock).items():
        median, low, high = spread(times)
        rows[name] |= {f"{what}_ms": median, f"{what}_range": [low, high], f"{what}_n": len(times)}
        flop = 2 * batch * args.heads * group.head_size * group.length * (group.length + 1)
        flop *= 1.0 if what == "forward" else 3.5
        rows[name][f"{what}_tflops"] = flop / median / 1e9
        rows[name][f"{what}_host_ms"] = calls[name, what][1]
    for name, row in rows.items():
        what = "forward_backward" if (name, "forward_backward") in calls else "forward"
        row["peak_mb"], row["peak_of"] = clock.peak_mb(calls[name, what][0]), what
        if name.startswith("fused") and what == "forward_backward":
            row["repeatable"] = repeatable(calls[name, what][0])
    report["timings"] += rows.values()


def bound(function, variant: Variant):
    return lambda: function(variant)


def warm(call, clock: Clock, repeats: int, deadline: float) -> tuple[float, int]:
    """Call once to compile, and return (milliseconds of the host per call, repetitions to time).

    The number of repetitions is at most `repeats`, and smaller for a slow call.

    Raises:
        TimeoutError: The call is so slow that another one would pass `deadline`.
    """
    call()
    clock.wait()
    begun = time.perf_counter()
    host = clock.host_ms(call)
    whole = 1e3 * (time.perf_counter() - begun)
    if whole > SLOW:
        if time.monotonic() + 2e-3 * whole > deadline:
            raise TimeoutError(f"one call takes {1e-3 * whole:.0f} s: no time left for more")
        return host, 1
    host = clock.host_ms(call)
    once = clock.device_ms(call, host)
    return host, max(min(FEWEST, repeats), min(repeats, int(MILLISECONDS / max(once, 1e-3))))


def interleaved(calls: dict, clock: Clock) -> dict[tuple[str, str], list[float]]:
    """Run all repetitions in interleaved rounds, and return the times of each call.

    A call with fewer repetitions than others takes part in only some rounds, evenly spread.
    """
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    rounds = max((count for _, _, count in calls.values()), default=0)
    for n in range(rounds):
        for key, (call, host, count) in calls.items():
            if (n + 1) * count // rounds > n * count // rounds:
                times[key].append(clock.device_ms(call, host))
    return times


def spread(times: list[float]) -> tuple[float, float, float]:
    """Return the median, the 10% quantile and the 90% quantile."""
    ordered = sorted(times)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return middle, ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def repeatable(call) -> bool:
    return all(torch.equal(x, y) for x, y in zip(call(), call(), strict=True))


def accuracy(
    names: list[str],
    group: Group,
    heads: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    report: dict,
) -> list[dict]:
    """Return one row per variant with the errors of its output and gradients.

    If the first group has short sequences, its size is used, so each variant compiles only once.
    """
    small = group.length <= 1024
    batch, length = (max(1, tokens // group.length), group.length) if small else (1, 1024)
    where, rows = {"T": length, "B": batch, "E": group.head_size}, []
    inputs = make_inputs((batch, heads, length, group.head_size), dtype, device)
    exact = inputs.in_float64()
    for name in names:
        variant = variants()[name]
        truth = Variant(name, reference(variant), variant.pos, variant.group)
        try:
            got, true = inputs.both(variant), exact.both(truth)
        except Exception as error:
            if broken(error):
                raise
            row = {"group": -1, "variant": name, "what": "accuracy", "why": reason(error)}
            report["skipped"].append(where | row)
            continue
        pairs = zip(RESULTS, got, true, strict=False)
        errors = {key: ((x.double() - y).abs().max() / y.abs().max()).item() for key, x, y in pairs}
        rows.append({"variant": name} | where | errors)
    return rows


def reference(variant: Variant):
    def function(q, k, v, theta_HN):
        scale = q.shape[-1] ** -0.5
        return attend(q, k, v, variant.pos, theta_HN, scale=scale, backend="eager")

    return function
