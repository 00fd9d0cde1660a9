"""Time products with a weight matrix on a CPU, in fp32: MKL against oneDNN.

    python benchmarks/host/linear_time.py --out benchmarks/results/linear_time

The products are those of a transformer block: width -> 3 widths, width -> width, width -> 4 widths
and back. `torch.nn.functional.linear` uses MKL, and `megatron.parallel.matmul_library` with
`PREFERS_ONEDNN` uses oneDNN. Both are timed in turns. A row has the medians of the sums over the
four products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import bars, facts, write
from megatron.parallel import matmul_library as products

PASSES = ("forward", "forward and backward")


def milliseconds(multiply: Callable[..., torch.Tensor], rows: int, width: int) -> list[float]:
    """Return the time of all products' forward passes, and of their forward and backward passes."""
    found = [0.0, 0.0]
    for inner, outer in (
        (width, 3 * width),
        (width, width),
        (width, 4 * width),
        (4 * width, width),
    ):
        x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
        leaves = [x, weight, torch.randn(outer)]
        begun = time.perf_counter()
        multiply(*leaves)
        found[0] += 1e3 * (time.perf_counter() - begun)
        leaves, grad = [leaf.requires_grad_() for leaf in leaves], torch.randn(rows, outer)
        begun = time.perf_counter()
        torch.autograd.grad(multiply(*leaves), leaves, grad)
        found[1] += 1e3 * (time.perf_counter() - begun)
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    products.PREFERS_ONEDNN = True
    libraries = {"MKL": F.linear, "oneDNN": products.linear}
    table = []
    for width in args.widths:
        times = {library: [] for library in libraries}
        for _ in range(args.rounds):
            for library, multiply in libraries.items():
                times[library].append(milliseconds(multiply, args.rows, width))
        for n, name in enumerate(PASSES):
            mkl, onednn = (statistics.median(t[n] for t in times[key]) for key in libraries)
            row = {"width": width, "passes": name, "MKL, ms": round(mkl, 2)}
            table.append(row | {"oneDNN, ms": round(onednn, 2), "ratio": round(onednn / mkl, 2)})
    return table


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    names = [f"width {row['width']}, {row['passes']}" for row in rows]
    bars(axes, names, {"": [row["ratio"] for row in rows]}, "{:.2f}")
    axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1)
    axes.set_xlabel("time with oneDNN, divided by the time with MKL")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="Products in fp32 on a CPU: MKL against oneDNN")
    found.add_argument("--widths", type=int, nargs="+", default=[128, 512, 768])
    found.add_argument("--rows", type=int, default=2048, help="tokens of a micro-batch")
    found.add_argument("--rounds", type=int, default=20)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--out", help="path of the table and plot, without suffix")
    return found


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    about = [f"torch {torch.__version__}, {args.threads} threads, {args.rows} rows"]
    about += [f"chosen on this processor: {'oneDNN' if products.PREFERS_ONEDNN else 'MKL'}"]
    title = "Products in fp32 on a CPU"
    write(args.out, title, facts("benchmarks/host/linear_time.py") + about, measure(args), draw)


if __name__ == "__main__":
    main()
