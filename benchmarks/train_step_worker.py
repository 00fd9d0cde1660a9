"""Run the steps of one variant of `train_step.py`, whose worker process this is.

    python -m benchmarks.train_step_worker '{"variant": "plain", "layers": 4, ...}'

The first line on stdout says that the worker is ready. Each line on stdin is a command, and each
answer is a line of JSON on stdout. `round` takes some steps and answers their tokens per second;
`profile` answers what a step takes, and its parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__" and re.search('"variant": "(project|plain, our)', sys.argv[1]):
    import megatron.entry  # noqa: F401  as every command: it says how OpenMP's threads wait

# isort: split
import numpy as np
import torch
from torch import nn

from benchmarks.attention_cpu import peak_bytes
from benchmarks.plain_gpt import PlainGPT
from megatron.attention import choose
from megatron.cpu_settings import described_waiting, keep_memory
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.loss import mean_loss
from megatron.positional import load

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = {
    "attention": (
        "kerple::",
        "FusedAttention",
        "Blocked",
        "scaled_dot_product",
        "_flash_attention",
    ),
    "optimizer": ("Optimizer.step", "Optimizer.zero_grad", "clip_grad"),
    "loss": ("cross_entropy", "log_softmax", "nll_loss", "LogSoftmax", "NllLoss"),
    "products": (
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::bmm",
        "AddmmBackward",
        "MmBackward",
        "convolution",
        "ConvolutionBackward",
    ),
    "norms, activations": ("layer_norm", "LayerNorm", "gelu", "Gelu"),
}
"""Maps a part of the step to the beginnings or pieces of its operations' names."""
ENGINE = {
    "project": {},
    "project, compiled": {"torch_compile": True},
    "project, CUDA graphs": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
}
"""Maps a variant that needs DeepSpeed to its config keys."""
Step = Callable[[], None]


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    if args.device == "cpu" and args.variant.startswith(("project", "plain, our")):
        keep_memory()
    step = step_of(args)
    commands = {
        "round": lambda: tokens_per_second(step, args),
        "profile": lambda: {
            **spent(step, args.steps),
            "peak_mb": peak_mb(step, args.device),
            "parts": parts_of(step, args),
            "waiting": described_waiting(),
        },
    }
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), file=answers, flush=True)


def step_of(args: argparse.Namespace) -> Step:
    """Return a function that takes one training step."""
    shape = (args.layers, args.width, args.heads, args.length, args.vocab)
    if args.variant in ENGINE:
        return engine_step(args)
    if args.variant.startswith("project"):
        model = ProjectLoss(args)
    else:
        model = PlainGPT(*shape, theta=args.variant == "published")
    if args.variant.endswith("compiled"):
        model.compile()
    return loop_step(model, args)


class ProjectLoss(nn.Module):
    """The project's GPT with `kerple_log`, from inputs and targets [B, T] to the mean loss."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        pos = load("kerple_log")
        attend = choose("auto", pos, device_type=args.device, dtype=DTYPES[args.precision])
        block = BlockShape(args.width, args.heads)
        self.gpt = GPT(Plan(GPTShape(args.layers, args.vocab, block, args.length), pos, attend, 1))

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return mean_loss(self.gpt(inputs_BT, targets_BT), targets_BT)


def tokens(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.randint(args.vocab, (args.batch, args.length + 1), device=args.device)
    return found[:, :-1], found[:, 1:]


def loop_step(model: nn.Module, args: argparse.Namespace) -> Step:
    """Return a plain loop's step: in bf16, with fp32 weights under autocast."""
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    narrow = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    def step() -> None:
        with narrow:
            loss = model(*tokens(args))
        loss.backward()
        with torch.profiler.record_function("clip_grad"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine_step(args: argparse.Namespace) -> Step:
    """Return the step of `train.py`, for a config of this shape."""
    from megatron.config import load_config
    from megatron.engine.job.join import join_job
    from megatron.engine.local_model import build_local_model
    from megatron.engine.training.deepspeed_engine import job_engine
    from megatron.engine.training.loop import train_step

    keys = {
        "num_layers": args.layers, "hidden_size": args.width, "num_attention_heads": args.heads,
        "seq_length": args.length, "pos_emb": "kerple_log", "no_weight_tying": True,
        "tokenizer_type": "ByteLevelTokenizer", "make_vocab_size_divisible_by": 1,
        "train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "train_iters": 10**6, "precision": {"fp32": "fp32", "bf16": "bfloat16"}[args.precision],
        "zero_optimization": {"stage": 1}, **ENGINE[args.variant],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(json.dumps(keys))
        config = load_config([path], world_size=1)
    groups = join_job()
    model = build_local_model(config, args.vocab, groups)
    engine, _ = job_engine(config, model, groups)
    shape, random = (args.batch, args.length + 1), np.random.default_rng(1)
    batches = (random.integers(args.vocab, size=shape) for _ in iter(int, 1))

    def step() -> None:
        train_step(engine, batches, 1, groups)

    return step


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def tokens_per_second(step: Step, args: argparse.Namespace) -> float:
    synchronize(args)
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    synchronize(args)
    return args.steps * args.batch * args.length / (time.perf_counter() - start)


def spent(step: Step, steps: int) -> dict[str, float]:
    """Return the processor time in milliseconds and the page faults of a step.

    With one thread, other programs disturb the least of these times little.
    """
    times, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"cpu_ms": 1e3 * min(times), "page_faults": faults / steps}


def matmul_tflops(args: argparse.Namespace) -> float:
    """Return the best TFLOP/s of a product of two square matrices, in the run's precision."""
    size = 8192 if args.device == "cuda" else 1536
    a, b = (torch.randn(size, size, device=args.device).to(DTYPES[args.precision]) for _ in "ab")
    best = 0.0
    for _ in range(20):
        synchronize(args)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(args)
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def peak_mb(step: Step, device: str) -> float:
    """Return the most memory that a step allocates: on a CPU without weights and their state."""
    if device == "cpu":
        return peak_bytes(step) / 1e6
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 1e6


def parts_of(step: Step, args: argparse.Namespace) -> dict[str, float]:
    """Return the share of each part in the time of a step."""
    cuda = args.device == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as profiler:
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        synchronize(args)
        taken = 1e6 * (time.perf_counter() - start)
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.events() or []:
        if event.device_type.name != "CPU":  # a kernel, whose time its operation has too
            continue
        time_us = event.self_device_time_total if cuda else event.self_cpu_time_total
        names, at = [], event
        while at is not None:
            names.append(at.name)
            at = at.cpu_parent
        matches = (part for part, keys in PARTS.items() if any(k in n for n in names for k in keys))
        spent[next(matches, "other operations")] += time_us / taken
    return spent | {"Python and engine": 1 - sum(spent.values())}


if __name__ == "__main__":
    main()
