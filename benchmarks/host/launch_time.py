"""Measure the time of the host for a call of fused attention, until the GPU has all its work.

    python benchmarks/host/launch_time.py --out benchmarks/results/launch_time
    python benchmarks/host/launch_time.py --device cuda --out benchmarks/results/launch_time_gpu

The calls are those of the module `megatron.kernels.launch` (tensors in, tensors out) and those of
an attention function with autograd, as in a model. Each is timed with cached launches
(`cached_launches: true`) and without, in turns. The numbers are medians in microseconds.

Without a GPU (`--device cpu`), Triton's driver is replaced by one that launches nothing, and
nothing is compiled: see `without_a_gpu`. So everything is timed that runs in Python, but neither
the part of a launch in C nor CUDA's allocator. On a GPU, the queue of launches never fills.

`--profile` also prints which functions take the time, as cProfile counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from statistics import quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from benchmarks.attention_gpu import DTYPES
from benchmarks.report import bars, facts, write
from megatron.attention import AttentionFn, Call, cache_launches, fused
from megatron.attention.backend import Request
from megatron.kernels import launch
from megatron.positional import load

GOALS = {"forward": 30, "forward and backward": 80}
"""The goals of cached launches, in microseconds."""
ROUND = 20
"""The number of calls in a row. A GPU can queue far more launches."""


class NoDevice:
    """A driver of Triton for a GPU of compute capability 8.6 that launches nothing."""

    utils = SimpleNamespace()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 86, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NoKernel(CompiledKernel):
    """A kernel that Triton would have compiled."""

    def __init__(self, source: Any, **_: Any):
        self.src, self.name = source, source.fn.__name__
        self.module = self.function = self.packed_metadata = "none"
        self._run = self.launch

    def launch(self, *arguments: Any) -> None:
        """Do nothing, instead of a launch."""


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Let Triton choose kernels for tensors on the CPU, but neither compile nor launch them."""
    with (
        mock.patch.object(triton.runtime.driver, "_active", NoDevice()),
        mock.patch.object(triton.compiler, "compile", NoKernel),
    ):
        yield


def calls_of(args: argparse.Namespace) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the functions to time, by the name of the call and its passes."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    shape = (args.batch, args.length, args.heads, args.head_size)
    given = torch.randn(4, *shape, device=device, dtype=dtype).transpose(2, 3).unbind()
    q, k, v, grad = (x.detach() for x in given)
    pos, scale = load(args.pos_emb), args.head_size**-0.5
    theta = pos.initial_theta(args.heads, torch.Generator().manual_seed(0)).to(device)
    functions, _ = fused.functions_of(pos)
    setting = launch.Setting(functions, scale)
    rows = fused.tabulate(pos, theta, args.length, scale) if functions.tabulated else theta
    leaves = [x.clone().requires_grad_() for x in (q, k, v, theta)]
    request = Request(pos, args.device, dtype, head_size=args.head_size)
    attend = AttentionFn(fused.BACKEND, "", request)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return launch.forward(q, k, v, rows, None, setting)

    def both() -> object:
        return launch.backward(grad, q, k, v, *forward(), rows, None, setting, True)

    def attention() -> Tensor:
        return attend(Call(*leaves[:3], pos, leaves[3], scale=scale))

    def step() -> object:
        return torch.autograd.grad(attention(), leaves, grad)

    calls = {"launch": (forward, both), "attention with autograd": (attention, step)}
    passes = ("forward", "forward and backward")
    return {
        (what, name): c for what, two in calls.items() for name, c in zip(passes, two, strict=True)
    }


def measure(args: argparse.Namespace) -> list[dict]:
    """Return the rows of the table."""
    wait = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    calls, rows = calls_of(args), []
    for (what, passes), call in calls.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(-1, args.rounds):
            for cached, found in times.items():
                cache_launches(cached)
                wait()
                some = [microseconds(call) for _ in range(ROUND)]
                found += some if number >= 0 else []  # the first round compiles
        wait()
        cells = {False: "Triton's launch, us", True: "cached, us"}
        row: dict[str, Any] = {"call": what, "passes": passes}
        for cached, found in times.items():
            tenths = quantiles(found, n=10)
            row[cells[cached]] = round(tenths[4], 1)
            row[f"{cells[cached]}: 10% and 90%"] = f"{tenths[0]:.1f}, {tenths[8]:.1f}"
        rows.append(row | {"goal, us": f"<= {GOALS[passes]}"})
    cache_launches(False)
    return rows


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return 1e-3 * (time.perf_counter_ns() - begun)


def profile(args: argparse.Namespace, cached: bool) -> None:
    """Print the functions that take most of the time of forward and backward passes."""
    *_, call = calls_of(args).values()
    cache_launches(cached)
    call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(ROUND * args.rounds):
        call()
    profiler.disable()
    cache_launches(False)
    print(f"{ROUND * args.rounds} calls, cached launches: {cached}")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def draw(figure: Any, rows: list[dict]) -> None:
    axes = figure.subplots()
    columns = [key for key in rows[0] if key.endswith(", us") and key != "goal, us"]
    names = [f"{row['call']}, {row['passes']}" for row in rows]
    values = {key.removesuffix(", us"): [row[key] for row in rows] for key in columns}
    bars(axes, names, values, "{:,.0f}")
    axes.set_xlabel("microseconds of the host (median)")
    axes.legend()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="The host's time for a call of fused attention")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--dtype", choices=DTYPES, default="bf16")
    found.add_argument("--pos-emb", default="kerple_log", help="with theta; no other terms")
    found.add_argument("--batch", type=int, default=1)
    found.add_argument("--heads", type=int, default=12)
    found.add_argument("--length", type=int, default=128)
    found.add_argument("--head-size", type=int, default=64)
    found.add_argument("--rounds", type=int, default=100, help=f"of {ROUND} calls")
    found.add_argument("--profile", action="store_true", help="print where the time goes")
    found.add_argument("--out", help="path of the table and plot, without suffix")
    return found


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, and write it."""
    about = [
        f"torch {torch.__version__}, Triton {triton.__version__}, {args.pos_emb}, {args.dtype}"
    ]
    about += [f"batch {args.batch}, {args.heads} heads of {args.head_size}, length {args.length}"]
    if args.device == "cuda":
        about += [torch.cuda.get_device_name()]
    else:
        about += ["no GPU: nothing is launched, so Triton's launcher in C is not in the times"]
    rows = measure(args)
    title = "Time of the host for a call of fused attention"
    write(args.out, title, facts("benchmarks/host/launch_time.py") + about, rows, draw)
    for cached in (False, True) if args.profile else ():
        profile(args, cached)


def main() -> None:
    args = parser().parse_args()
    with contextlib.nullcontext() if args.device == "cuda" else without_a_gpu():
        run(args)


if __name__ == "__main__":
    main()
