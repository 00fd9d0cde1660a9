"""Search for the layouts and micro-batches with which a run fits on its GPUs and is fastest.

First, `sketched` estimates the size, memory and communication of a rank by formulas, for all
candidates. Then the fastest candidates that may fit are planned exactly, one after the other.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import ceil
from operator import itemgetter

from megatron.config import Config, ConfigError
from megatron.config.mlp_width import GATED
from megatron.engine.model_shape import DTYPES
from megatron.model.shape import GPTShape
from megatron.plan.memory import GIB, moments, peak_of
from megatron.plan.step import Step
from megatron.plan.step_time import Cluster, StepTime, step_time

BEST = 5
"""How many layouts are listed."""
MOST_PLANNED = 24
"""How many candidates are planned exactly, at most; each takes some seconds."""
KEYS = [
    "model_parallel_size", "pipe_parallel_size", "zero_optimization.stage",
    "train_micro_batch_size_per_gpu", "checkpoint_activations", "train_batch_size",
    "gradient_accumulation_steps",
]  # fmt: skip
NOTHING_FITS = "  nothing that was tried; use more GPUs, or GPUs with more memory"
GAP = 1.15
"""A sketch that needs more than this part of the usable memory is not planned exactly."""


def best_layouts(
    load: Callable[..., Config],
    shape: GPTShape,
    keys: float,
    cluster: Cluster,
    usable: float,
    vocab_size: int,
) -> Iterator[str]:
    """Yield two lines of text for each of the best layouts that fit, the fastest layout first.

    Args:
        load: A function from overrides to the changed config.
        keys: The mean number of keys that a query sees.
        usable: The bytes of a GPU's memory that the run may use.
        vocab_size: The size of the tokenizer's vocabulary, before padding.
    """
    sketches: list[tuple[float, Config, list[str]]] = []
    for overrides, config in _candidates(load, cluster):
        step = sketched(config, shape)
        needs = max(sum(each.values()) for each in moments(config, step, "cuda"))
        if needs <= GAP * usable:
            time = step_time(config, step, shape, keys, cluster)
            sketches.append((time.total, config, overrides))
    exact: list[tuple[float, StepTime, Config, list[str]]] = []
    for _, config, overrides in sorted(sketches, key=itemgetter(0))[:MOST_PLANNED]:
        step, memory = peak_of(config, vocab_size)
        if (needs := sum(memory.values())) <= usable:
            time = step_time(config, step, shape, keys, cluster)
            exact.append((needs, time, config, overrides))
        if len(exact) == BEST:
            break
    if not exact:
        yield NOTHING_FITS
    for needs, time, config, overrides in sorted(exact, key=lambda each: each[1].total):
        recomputes = " and recomputes" * config.model.checkpoint_activations
        parts = (time.compute, time.bubble, time.exposed)
        computes, waits, sends = (f"{part / time.total:.0%}" for part in parts)
        yield f"  {time.total:.3g} s, {needs / GIB:.1f} GiB: -o {' -o '.join(overrides)}"
        yield f"    computes{recomputes} {computes}, waits for stages {waits}, sends {sends}"


def _candidates(
    load: Callable[..., Config], cluster: Cluster
) -> Iterator[tuple[list[str], Config]]:
    """Yield each candidate: a list of config overrides, and the config with these overrides.

    All candidates have the `train_batch_size` of the original config.
    """
    size, powers = load().batch.train_batch_size, [2**i for i in range(5)]
    widths = [tensor for tensor in powers if cluster.per_node % tensor == 0]
    for *layout, micro, recomputes in product(widths, powers, (1, 2, 3), powers, (False, True)):
        values = (*layout, micro, str(recomputes).lower(), size, "null")
        overrides = [f"{key}={value}" for key, value in zip(KEYS, values, strict=True)]
        try:
            yield overrides, load(*overrides)
        except ConfigError:  # the layout does not divide the model or the batch
            continue


def sketched(config: Config, shape: GPTShape) -> Step:
    """Estimate a training step of one rank by formulas, without building the model.

    The result differs from that of `measured_step` by some tens of percent, but needs only
    microseconds.

    The formulas assume that, without recomputation, the inputs and outputs of all products are
    stored; with sequence parallelism, each tensor-parallel rank stores its part. They also assume
    that tensor parallelism sums hidden states over its ranks four times for each block, and a fifth
    time with recomputation.
    """
    p, m, block, b = config.parallel, config.model, shape.block, config.batch
    h, tp, stages = block.hidden_size, p.model_parallel_size, p.pipe_parallel_size
    heads, itemsize = block.num_heads * block.head_size, DTYPES[config.training.precision].itemsize
    tokens = b.train_micro_batch_size_per_gpu * m.seq_length // p.context_parallel_size
    blocks, gated = ceil(m.num_layers / stages), block.activation in GATED
    wide = (heads * (2 + 2 / block.group) + block.mlp_size * (3 if gated else 2)) / tp
    embeddings = shape.vocab_size * h * (2 if stages == 1 and not shape.tie_weights else 1)
    parameters = [int(h * wide)] * blocks + [embeddings // tp]
    x = tokens * h * itemsize
    shards = tp if p.sequence_parallel else 1
    one = int(tokens * itemsize * (4 * h / shards + wide))
    flying = min(b.gradient_accumulation_steps, stages)
    kept = flying * blocks * (x // shards if m.checkpoint_activations else one)
    sums = 5 if m.checkpoint_activations else 4
    sent = {"tensor": int(2 * (tp - 1) / tp * sums * blocks * x), "pipeline": x * (stages > 1)}
    return Step(parameters, [], kept, [(0, kept + one), (sum(parameters), 2 * one)], 0, sent)
