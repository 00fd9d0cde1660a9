"""Measure the peak memory of a training step with the loss in pieces, and with all logits at once.

    python benchmarks/loss_memory.py --batches 4 8 16

A step is the forward and the backward pass of a small model with a large vocabulary, on the CPU.
What it allocates is counted, gradients included, weights not.
The table goes to stdout.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from unittest import mock

import torch

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel import loss
from megatron.positional import load
from tests.helpers.peak import peak_bytes

VOCABULARY = 50304
LENGTH = 512
MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="How much memory the loss of a step needs")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16])
    args = parser.parse_args()
    print("| precision | tokens | all logits at once | in pieces |\n|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for batch in args.batches:
            peaks = []
            for limit in (1 << 62, loss.LOGITS_AT_ONCE):
                with mock.patch.object(loss, "LOGITS_AT_ONCE", limit):
                    peaks.append(step_bytes(args.layers, args.width, batch, dtype) / MB)
            precision = str(dtype).removeprefix("torch.")
            text = f"| {batch * LENGTH:,} | {peaks[0]:,.0f} MB | {peaks[1]:,.0f} MB |"
            print(f"| {precision} {text}", flush=True)


def step_bytes(layers: int, width: int, batch: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a step has allocated at the same time."""
    pos = load("kerple_log")
    attend = choose("auto", pos, device_type="cpu", dtype=dtype)
    shape = GPTShape(layers, VOCABULARY, BlockShape(width, width // 64), LENGTH, tie_weights=True)
    model = GPT(Plan(shape, pos, attend, 1)).to(dtype)
    tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1))
    with tempfile.TemporaryDirectory() as folder:
        return peak_bytes(
            lambda: model(tokens[:, :-1], tokens[:, 1:]).mean().backward(), Path(folder)
        )


if __name__ == "__main__":
    main()
