"""Plan a run without data or a device: its memory, communication, time and cost, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch

from megatron.config import Config, ConfigError
from megatron.data.errors import TokenizerError
from megatron.engine.build import describe_attention, plan_of, tokenizer_of
from megatron.engine.errors import StartError
from megatron.engine.gpus import gpu_named
from megatron.engine.model_shape import DTYPES
from megatron.engine.training.speed import flops_per_token, mean_keys
from megatron.model import GPT
from megatron.plan.memory import peak_of
from megatron.plan.step import Step

GIB = 2**30
USABLE = 0.9
"""The part of a GPU's memory that tensors may fill. CUDA, NCCL, error correction and unused pieces
between tensors take the rest."""
GPT2_VOCABULARY = 50257
MOST_FITS = 3
"""How many settings that fit are named."""


def plan_text(
    load: Callable[..., Config], gpu_name: str, efficiency: float, price: float | None
) -> str:
    """Return the plan of a run as text.

    Args:
        load: A function from overrides such as `checkpoint_activations=true` to the config.
        gpu_name: The name of a GPU.
        efficiency: The fraction of the GPU's peak rate that the run reaches (MFU), above 0 and at
            most 1.
        price: The price of one hour of one GPU, or None.

    Raises:
        StartError: The GPU is unknown, or cannot compute in the config's precision.
        AttentionError: The attention backend does not support this model.
    """
    # `gpus.GPUS` lists the names.
    config, gpu = load(), gpu_named(gpu_name)
    precision, world_size = config.training.precision, config.parallel.world_size
    if precision == "bf16" and not gpu.has_bf16:
        raise StartError(f"--gpu {gpu_name} has no bf16; write precision: fp16")
    if not 0.0 < efficiency <= 1.0:
        raise StartError(f"--mfu {efficiency}: write a number above 0 and at most 1, such as 0.4")
    if config.model.attention_backend in ("sdpa", "flex"):  # they keep no more than fused
        load = partial(load, "attention_backend=auto")
        config = load()
    notes, vocab_size = [], GPT2_VOCABULARY
    try:
        vocab_size = tokenizer_of(config).vocab_size
    except TokenizerError as error:
        notes = [f"a vocabulary of {vocab_size:,}, because the tokenizer is not here ({error})"]
    plan = plan_of(config, vocab_size, device_type="cuda", eod=0)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in GPT(plan).parameters())
    step, memory = peak_of(config, vocab_size)
    total, usable = sum(memory.values()), USABLE * gpu.memory * GIB
    lines = [f"{parameters:,} parameters on {world_size} {gpu_name}"]
    lines += [*describe_attention(plan.attends), *notes, "memory of the fullest rank, in GiB"]
    lines += _table(memory)
    fits = "fits" if total <= usable else "does not fit"
    lines += [f"  {'in all':<16}{total / GIB:8.2f}: {fits} into {USABLE:.0%} of {gpu.memory:g}"]
    if total > usable:
        found = [*islice(_fitting(config, load, usable, vocab_size), MOST_FITS)]
        nothing = ["  nothing that was tried; use more GPUs, or GPUs with more memory"]
        lines += ["what fits:", *(found or nothing)]
    if sent := _table(sent_per_step(config, step)):
        lines += ["what this rank sends in a step, in GiB", *sent]
    rate = (gpu.rate32 if precision == "fp32" else gpu.rate16) * efficiency
    flop = flops_per_token(plan.shape, mean_keys(config))
    lines += [*_time_lines(config, flop, rate, price)]
    if config.training.curriculum:
        lines += ["a step's time is the mean over the lengths of the curriculum"]
    if config.model.reset_attention_mask:
        lines += ["each sequence counts as one document; shorter documents take less time"]
    return "\n".join(lines)


def _table(values: dict[str, float]) -> list[str]:
    return [f"  {name:<16}{value / GIB:8.2f}" for name, value in values.items() if value]


def sent_per_step(config: Config, step: Step) -> dict[str, float]:
    """Return the bytes that a rank sends in a training step, for each kind of parallelism."""
    # Collectives are counted as ring algorithms: in an all-reduce over D ranks, each rank sends 2
    # (D - 1) / D times the bytes of the tensor.
    p, several = config.parallel, config.batch.gradient_accumulation_steps
    replicas = p.data_parallel_size * p.context_parallel_size
    half = step.size * DTYPES[config.training.precision].itemsize * (replicas - 1) / replicas
    # A sum, or a sum of slices and a gathering. ZeRO-2 sums after each micro-batch; ZeRO-3 also
    # gathers the weights for each forward and each backward pass.
    halves = {2: several + 1, 3: 3 * several}.get(p.zero_stage, 2)
    return {"data": halves * half} | {name: several * sent for name, sent in step.sent.items()}


def _time_lines(config: Config, flop: float, rate: float, price: float | None) -> Iterator[str]:
    """Yield lines about time and cost.

    Args:
        flop: The floating-point operations of one token.
        rate: The TFLOP/s that each GPU reaches.
        price: The price of one hour of one GPU, or None.
    """
    b, steps, gpus = config.batch, config.training.train_iters, config.parallel.world_size
    tokens = b.train_batch_size * config.model.seq_length
    seconds = tokens * flop / (gpus * rate * 1e12)
    yield (
        f"a step of {tokens:,} tokens and {tokens * flop:.3g} FLOP takes {seconds:.3g} s if each "
        f"GPU reaches {rate:.0f} TFLOP/s"
    )
    if waits := config.parallel.pipe_parallel_size - 1:
        idle = waits / (waits + b.gradient_accumulation_steps)
        yield f"in which a pipeline stage waits {idle:.0%} of the time for others"
    hours = seconds * steps / 3600
    yield f"{steps:,} steps take {hours:,.1f} hours, {gpus * hours:,.0f} GPU hours"
    if price is not None:
        yield f"which cost {gpus * hours * price:,.0f} at {price:g} for a GPU hour"


def _fitting(
    config: Config, load: Callable[..., Config], usable: float, vocab_size: int
) -> Iterator[str]:
    """Yield a line for each set of config overrides that makes the run fit on the GPU.

    The fastest overrides come first.

    Args:
        load: A function from overrides to the changed config.
        usable: The bytes of a GPU's memory that the run may use.
    """
    # A line contains the overrides and the memory that the run needs with them. The value of
    # `train_batch_size` stays the same.
    size = config.batch.train_batch_size
    batch = [f"train_batch_size={size}", "gradient_accumulation_steps=null"]
    for overrides in _candidates(config):
        for given in (overrides, [*overrides, *batch]):
            try:
                changed = load(*given)
            except ConfigError:  # the layout does not divide the model or the batch
                continue
            if changed.batch.train_batch_size == size:
                total = sum(peak_of(changed, vocab_size)[1].values())
                if total <= usable:
                    yield f"  -o {' -o '.join(given)}: {total / GIB:.1f} GiB"
                break


def _candidates(config: Config) -> Iterator[list[str]]:
    """Yield config overrides that need less memory: first small changes, then other layouts."""
    p, micro = config.parallel, config.batch.train_micro_batch_size_per_gpu
    less = [] if config.model.checkpoint_activations else ["checkpoint_activations=true"]
    if less:
        yield less
    for size in sorted({micro // 2, 1} - {0, micro}, reverse=True):
        yield [*less, f"train_micro_batch_size_per_gpu={size}"]
    less = [*less, *["train_micro_batch_size_per_gpu=1"] * (micro > 1)]
    if p.pipe_parallel_size == 1:
        yield from ([f"zero_optimization.stage={x}", *less] for x in range(p.zero_stage + 1, 4))
    for tensor, stages in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 2), (8, 4), (8, 8)):
        if tensor * stages > p.model_parallel_size * p.pipe_parallel_size:
            layout = [f"model_parallel_size={tensor}", f"pipe_parallel_size={stages}"]
            yield [*layout, *["zero_optimization.stage=1"] * (stages > 1), *less]
