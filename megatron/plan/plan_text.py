"""Plan a run without data or a device: its memory, communication, time and cost, as text."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron.config import Config
from megatron.data.errors import TokenizerError
from megatron.engine.build import describe_attention, plan_of, tokenizer_of
from megatron.engine.errors import StartError
from megatron.engine.gpus import gpu_named
from megatron.engine.training.speed import flops_per_token, mean_keys
from megatron.model import GPT
from megatron.plan.memory import GIB, peak_of
from megatron.plan.search import best_layouts
from megatron.plan.step_time import CALIBRATED, Cluster, StepTime, sent_per_step, step_time

USABLE = 0.9
"""The part of a GPU's memory that tensors may fill. CUDA, NCCL, error correction and unused pieces
between tensors take the rest."""
GPT2_VOCABULARY = 50257


def plan_text(
    load: Callable[..., Config],
    gpu_name: str,
    efficiency: float | None = None,
    price: float | None = None,
    per_node: int = 8,
    network: float | None = None,
    search: bool = False,
) -> str:
    """Return the plan of a run as text.

    Args:
        load: A function from overrides such as `checkpoint_activations=true` to the config.
        gpu_name: The name of a GPU in `gpus.GPUS`.
        efficiency: The fraction of the GPU's peak rate that the run reaches (MFU), above 0 and at
            most 1, or None to estimate the time from the layout.
        price: The price of one hour of one GPU, or None.
        per_node: The number of GPUs in a machine.
        network: The network bandwidth of each machine in Gbit/s. None means the value in
            `gpus.GPUS`.
        search: Whether to list the fastest layouts that fit, even if the config's layout fits.

    Raises:
        StartError: The GPU is unknown, or cannot compute in the config's precision.
        AttentionError: The attention backend does not support this model.
    """
    config, gpu = load(), gpu_named(gpu_name)
    precision, world_size = config.training.precision, config.parallel.world_size
    if precision == "bf16" and not gpu.has_bf16:
        raise StartError(f"--gpu {gpu_name} has no bf16; write precision: fp16")
    if efficiency is not None and not 0.0 < efficiency <= 1.0:
        raise StartError(f"--mfu {efficiency}: write a number above 0 and at most 1, such as 0.4")
    if config.model.attention_backend in ("sdpa", "flex"):  # they keep no more than fused
        config = (load := partial(load, "attention_backend=auto"))()
    vocab_size, notes = _vocabulary(config)
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
    if sent := _table(sent_per_step(config, step)):
        lines += ["what this rank sends in a step, in GiB", *sent]
    peak, keys = gpu.rate32 if precision == "fp32" else gpu.rate16, mean_keys(config)
    cluster = Cluster(gpu, per_node, network or gpu.network * per_node / 8)
    time = step_time(config, step, plan.shape, keys, cluster)
    flop = flops_per_token(plan.shape, keys)
    lines += _time_lines(config, flop, peak, efficiency, time, price)
    lines += _remarks(config, per_node)
    if search or total > usable:
        lines += ["the fastest layouts that fit, with the same train_batch_size"]
        lines += best_layouts(load, plan.shape, keys, cluster, usable, vocab_size)
    return "\n".join(lines)


def _vocabulary(config: Config) -> tuple[int, list[str]]:
    """Return the size of the vocabulary, and a line for the plan if the size is assumed."""
    try:
        return tokenizer_of(config).vocab_size, []
    except TokenizerError as error:
        note = f"a vocabulary of {GPT2_VOCABULARY:,}, because the tokenizer is not here ({error})"
        return GPT2_VOCABULARY, [note]


def _remarks(config: Config, per_node: int) -> list[str]:
    """Return lines for the plan: a warning about the layout, and the plan's assumptions."""
    p, found = config.parallel, []
    if p.world_size > per_node and per_node % p.model_parallel_size:
        crosses = f"tensor parallelism of {p.model_parallel_size} crosses machines of {per_node}"
        divides = f"write a model_parallel_size that divides {per_node}"
        found += [f"warning: {crosses} GPUs, and each block waits for the network; {divides}"]
    if config.training.curriculum:
        found += ["a step's time is the mean over the lengths of the curriculum"]
    if config.model.reset_attention_mask:
        found += ["each sequence counts as one document; shorter documents take less time"]
    return found


def _table(values: dict[str, float]) -> list[str]:
    return [f"  {name:<16}{value / GIB:8.2f}" for name, value in values.items() if value]


def _time_lines(
    config: Config,
    flop: float,
    peak: float,
    efficiency: float | None,
    time: StepTime,
    price: float | None,
) -> Iterator[str]:
    """Yield lines about time and cost.

    Args:
        flop: The floating-point operations of one token.
        peak: The peak TFLOP/s of each GPU.
        efficiency: The fraction of the peak rate that each GPU reaches. None means that `time` is
            used instead.
        time: The estimated time of a step.
        price: The price of one hour of one GPU, or None.
    """
    b, steps, gpus = config.batch, config.training.train_iters, config.parallel.world_size
    tokens = b.train_batch_size * config.model.seq_length
    given = f"a step of {tokens:,} tokens and {tokens * flop:.3g} FLOP takes"
    most = gpus * peak * 1e12
    if efficiency:
        seconds = tokens * flop / (most * efficiency)
        yield f"{given} {seconds:.3g} s if each GPU reaches {peak * efficiency:.0f} TFLOP/s"
    else:
        seconds = time.total
        low, high = (seconds * each for each in CALIBRATED.interval)
        mfu = tokens * flop / seconds / most
        yield f"{given} about {seconds:.3g} s ({low:.3g} to {high:.3g}), an MFU of {mfu:.2g}"
        yield "of which, in seconds, with communication that is exposed, and hidden beside the rest"
        yield from (f"  {name:<16}{value:8.3g}" for name, value in vars(time).items())
    hours = seconds * steps / 3600
    yield f"{steps:,} steps take {hours:,.1f} hours, {gpus * hours:,.0f} GPU hours"
    if price is not None:
        yield f"which cost {gpus * hours * price:,.0f} at {price:g} for a GPU hour"
