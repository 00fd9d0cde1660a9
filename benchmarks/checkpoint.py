"""Measure how long training waits for a checkpoint, saved synchronously and beside training.

    python benchmarks/checkpoint.py --layers 12 --width 768 --heads 12 --saves 4

One process trains a model of the given shape on random tokens, in short steps, and saves after some
of them, first synchronously, then with `async_save`. It prints the seconds of each save and of the
writing beside training, and the seconds of a step alone and beside the writing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.config import load_config
from megatron.engine.checkpoint.async_save import Saver
from megatron.engine.checkpoint.full_weights import describe
from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.write import Destination
from megatron.engine.job.join import join_job
from megatron.engine.local_model import build_local_model, count_parameters
from megatron.engine.training.deepspeed_engine import job_engine, layout_of

VOCABULARY = 50257


def main() -> None:
    parser = argparse.ArgumentParser(description="How long training waits for a save")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tied", action="store_true", help="tie the output to the embedding")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--length", type=int, default=32, help="tokens of a training sequence")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    groups = join_job()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        config = Path(folder) / "config.yml"
        config.write_text(
            f"num_layers: {args.layers}\nhidden_size: {args.width}\n"
            f"num_attention_heads: {args.heads}\nseq_length: {args.length}\n"
            f"no_weight_tying: {str(not args.tied).lower()}\npos_emb: kerple_log\n"
            "tokenizer_type: ByteLevelTokenizer\ntrain_micro_batch_size_per_gpu: 1\n"
            "optimizer: {type: Adam, params: {lr: 1.0e-4}}\ntrain_iters: 100\n"
            f"bf16: {{enabled: {str(args.precision == 'bf16').lower()}}}\n"
        )
        settings = load_config([config], world_size=1)
        model = build_local_model(settings, VOCABULARY, groups)
        engine, _ = job_engine(settings, model, groups)
        print(f"{count_parameters(model, groups):,} parameters, {args.precision}")
        run = RunDescription(layout=layout_of(settings, groups), **describe(model, groups))
        step = step_of(engine, args.length)
        print(f"a step alone: {statistics.median(step() for _ in range(3)):.2f} s")
        for beside in (False, True):
            to = Destination(Path(folder) / f"beside_{beside}", run)
            measure(Saver(engine, groups, to, beside_training=beside, say=print), step, args.saves)
            shutil.rmtree(to.folder)


def step_of(engine: Any, length: int) -> Callable[[], float]:
    """Return a function that takes one training step and returns its seconds."""
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), device=engine.device)

    def step() -> float:
        begun = time.monotonic()
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).mean())
        engine.step()
        return time.monotonic() - begun

    return step


def measure(saver: Saver, step: Callable[[], float], saves: int) -> None:
    """Save `saves` checkpoints; the lines of the saver have the times."""
    beside = []
    for number in range(1, saves + 1):
        step()
        saver.save(TrainingProgress(number, 0, 0))
        while saver.writes():
            beside.append(step())
        saver.wait()
    if beside:
        print(f"a step beside the writing: {statistics.median(beside):.2f} s")


if __name__ == "__main__":
    main()
