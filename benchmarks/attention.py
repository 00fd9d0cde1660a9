"""Compare the speed of attention with KERPLE's distance kernels with that of other code.

    python benchmarks/attention.py --device cuda --out benchmarks/results/attention_gpu
    python benchmarks/attention.py --device cuda --tiles --out benchmarks/results/attention_tiles
    python benchmarks/attention.py --device cpu --out runs/attention

The command needs torch, and on a GPU also triton. The module `attention_gpu` describes the
measurements on a GPU, `attention_tiles` the search for tile sizes, and `attention_cpu` the
measurements on a CPU. `--device interpreter` runs the code for GPUs without a GPU, on tiny inputs,
to test that it works. Its times have no meaning.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument("--device", choices=["cpu", "cuda", "interpreter"], default="cpu")
    found.add_argument("--out", type=Path, required=True, help="folder for the reports")
    found.add_argument("--heads", type=int, default=12)
    found.add_argument("--repeats", type=int, default=21)
    cpu = found.add_argument_group("on a CPU")
    cpu.add_argument("--length", type=int, default=512)
    cpu.add_argument("--head-size", type=int, default=64)
    cpu.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    cpu.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    cpu.add_argument("--documents", type=int, help="also measure as many documents of one length")
    cpu.add_argument("--window", type=int, help="also measure a window of this largest distance")
    cpu.add_argument("--warmup", type=int, default=3)
    gpu = found.add_argument_group("on a GPU")
    lengths = [512 << n for n in range(8)]
    gpu.add_argument("--lengths", type=int, nargs="+", default=lengths)
    gpu.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    gpu.add_argument("--tokens", type=int, default=16_384, help="B T, or one sequence if longer")
    gpu.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    gpu.add_argument("--only", nargs="+", help="variants whose names contain one of these")
    gpu.add_argument("--minutes", type=float, default=8.5, help="begin nothing new after these")
    gpu.add_argument("--quick", action="store_true", help="two lengths, one head size, no flex")
    gpu.add_argument("--tiles", action="store_true", help="search tile sizes instead")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.device == "cpu":
        from benchmarks.attention_cpu import run
    else:
        if args.device == "interpreter":
            os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        if args.tiles:
            from benchmarks.attention_tiles import run
        else:
            from benchmarks.attention_gpu import run
    run(args)


if __name__ == "__main__":
    main()
