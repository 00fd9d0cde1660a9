"""Compute the memory that one rank needs, for DeepSpeed's buffers and for the model's tensors.

    ZeRO     weights                     optimizer    gradients    in the optimizer's step
    0        b N                         8 N, 12 N    b N          4 N, 6 N
    1        b N                         12 N / D     b N          8 N / D
    2        b N                         12 N / D     b N / D      8 N / D
    3        b N / D, gathered weights   12 N / D     b N / D      8 N / D

Where there are two values, the first is for fp32 and the second for 16 bits. The optimizer is Adam,
with fp32 weights and two averages of 4 bytes per parameter. Muon has one average for the matrices
of the blocks, and gathers the updates of these matrices from all ranks. To sum gradients over
ranks, stage 0 copies the gradients. The other stages use a bucket of `reduce_bucket_size` numbers,
or of N if N is smaller. With `overlap_comm`, stages 1 and 2 have two buckets. If 16-bit gradients
are accumulated in fp32, stage 1 needs 4 N bytes more. `benchmarks/plan_memory.py` compares these
numbers with what DeepSpeed 0.19 allocates.

Legend: N parameters of this rank, D replicas of its weights (data- times context-parallel ranks), b
bytes of a number in the training precision.
"""

from collections.abc import Iterator

import torch

from megatron.config import Config
from megatron.engine.model_shape import DTYPES, sums_in
from megatron.engine.training.deepspeed_engine import REDUCE_BUCKET_SIZE
from megatron.engine.training.muon import CPU_DTYPE
from megatron.plan.step import Step, measured_step

GIB = 2**30
DEFAULTS = {
    "reduce_bucket_size": REDUCE_BUCKET_SIZE,  # also what stage 0 copies at once
    "stage3_max_live_parameters": 1e9,  # so many gathered weights stay
    "stage3_prefetch_bucket_size": 5e7,  # so many are received at once, and then copied
    "stage3_param_persistence_threshold": 1e5,  # smaller parameters are never divided
}
"""DeepSpeed's defaults, in numbers of elements (not bytes)."""

MATRICES_AT_ONCE = 3
"""How many copies of a matrix exist while Muon makes it orthogonal."""

Memory = dict[str, float]
"""Maps kinds of memory to bytes. The activations are kept for the backward pass. The working space
holds other temporary tensors, such as logits and the gradients of activations."""


def peak_of(config: Config, vocab_size: int, device_type: str = "cuda") -> tuple[Step, Memory]:
    """Return the training step and the peak memory of the rank that needs the most memory.

    Only the first and the last pipeline stage are compared.

    Args:
        vocab_size: The size of the tokenizer's vocabulary, before padding.
        device_type: "cuda" or "cpu", which decides the attention backend.

    Returns:
        (step, memory). `step` describes a training step of this rank. `memory` maps each kind of
        memory to its bytes at the peak.
    """
    stages = {0, config.parallel.pipe_parallel_size - 1}
    steps = [measured_step(config, vocab_size, stage, device_type) for stage in stages]
    found = ((step, memory) for step in steps for memory in moments(config, step, device_type))
    return max(found, key=lambda each: sum(each[1].values()))


def moments(config: Config, step: Step, device_type: str) -> Iterator[Memory]:
    """Yield a dict from kind of memory to bytes, for each moment at which a rank's memory may peak.

    Args:
        step: A training step of this rank, from `measured_step`.
    """
    p, t, size = config.parallel, config.training, step.size
    stage, zero = p.zero_stage, {k: float(p.zero.get(k, v)) for k, v in DEFAULTS.items()}
    b, sums = (DTYPES[x].itemsize for x in (t.precision, t.grad_accum_dtype or t.precision))
    shard = size / (p.data_parallel_size * p.context_parallel_size) if stage else size
    momenta = {"sgd": 4 if config.optimizer.momentum else 0}.get(config.optimizer.type, 8)
    matrices = step.matrices if config.optimizer.type == "muon" else []
    ours = sum(matrices) / size  # the part of each slice that Muon trains, on average
    momenta -= 4 * ours
    copy = 0 if stage == 0 and b == 4 else 4  # the optimizer's weights, unless it has the model's
    weights = b * (shard if stage == 3 else size)
    held: Memory = {"weights": weights, "optimizer": (momenta + copy) * shard}
    numbers = min(size, zero["reduce_bucket_size"])
    bucket = b * numbers * (2 if p.overlaps and stage in (1, 2) else 1)
    c = DTYPES[sums_in(config) or t.precision].itemsize
    # Copies of a full bucket: in the type of the sums and, with stage 2, slices side by side
    copies = numbers * ((c if c != b else 0) + (b if stage == 2 and size > 2 * shard else 0))
    several = config.batch.gradient_accumulation_steps > 1
    divided = sum(n for n in step.parameters if n > zero["stage3_param_persistence_threshold"])
    gathered = min(size, zero["stage3_max_live_parameters"])
    gathered = gathered + min(divided, zero["stage3_prefetch_bucket_size"]) if stage == 3 else 0
    for done, used in step.moments:
        gradients = b * (size if several else done)
        if stage == 1 and sums > b:
            gradients = sums * size + b * done
        elif stage >= 2:
            gradients = {2: b * (several + (done > numbers)), 3: sums}[stage] * shard
        kept = min(step.kept, used)
        # From the first gradient on, and with stage 1 until the last micro-batch
        reduces = stage == 3 or (stage and done) or (stage == 1 and several)
        yield held | {
            "weights": held["weights"] + b * gathered,
            "gradients": gradients,
            "activations": kept,
            "working space": used - kept,
            "communication": (bucket + copies * (done > numbers or done == size)) if reduces else 0,
        }
    # The gradients are added over the ranks. Then the optimizer takes its step.
    held["activations"] = step.left
    flat = min(size, DEFAULTS["reduce_bucket_size"])
    if stage == 0:
        yield held | {"gradients": b * size, "communication": b * flat}
    elif stage == 1 and sums > b:
        yield held | {"gradients": (sums + b) * size, "communication": (sums + b) * flat}
    elif stage == 1:
        gradients = max(b * size, b * max(size - numbers, 0) + b * shard)
        yield held | {"gradients": gradients, "communication": bucket + copies}
    in_step = {0: b + copy, 3: 8}.get(stage, 4 if sums > b else 8)
    yield held | {"gradients": in_step * shard}
    # Muon steps last. It gathers the updates of all matrices from the ranks' slices.
    gathers = sum(matrices) if shard < size else 0
    muon = ours * shard + gathers + MATRICES_AT_ONCE * max(matrices, default=0)
    muon *= (torch.bfloat16 if device_type == "cuda" else CPU_DTYPE).itemsize
    yield held | {"gradients": 4 * shard, "working space": muon}
