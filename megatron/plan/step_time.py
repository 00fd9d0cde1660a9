"""Estimate the time of a training step from its products, its memory traffic and its communication.

A pass of a rank over a micro-batch multiplies matrices: inputs [M, K] with weights [K, N] for the
M tokens of the rank. A product takes

    2 M K N / (e P)                  the operations
    + M (K + N) b a / B              its input and output, and other operations on them
    + K N b / B                      its weights (backward: twice, and their gradient three times)
    + t S K / (e P)                  half a wave of tiles, because the last wave is often not full

and attention, 4 M H E k / (e P). The backward pass takes twice the operations and the memory
traffic of the forward pass. Blocks that are computed again in the backward pass need another
forward pass. A stage waits for the CPU if launching all operations of a micro-batch takes longer
than computing them.

With m micro-batches on p stages (1F1B), the slowest stage computes m times and waits p - 1 times.
Tensor-, context- and pipeline-parallel communication stops the computation. If `overlap_comm` is on
(the default of ZeRO-3), gradients are sent during the computation. With ZeRO-3, so are weights.

Legend: e fraction of the peak rate P that large products reach, b bytes of a number, a how many
times each number is moved, B memory bandwidth, t operations of a tile for each unit of K, S
multiprocessors, H heads of size E, k keys that a query sees.

`Rates` are calibrated on published runs; docs/lab/published_runs.md has all runs and errors.
"""

from dataclasses import dataclass
from math import ceil

from megatron.config import Config
from megatron.config.mlp_width import GATED
from megatron.engine.gpus import Gpu
from megatron.engine.model_shape import DTYPES, sums_in
from megatron.model.shape import GPTShape
from megatron.plan.step import Step

TILE = 128 * 256
"""Outputs that a multiprocessor computes at once, in the large products of NVIDIA's libraries."""
LAUNCH = 1e-5
"""Seconds of the CPU for each operation that torch launches (an assumption, not calibrated)."""
UPDATES = 10
"""Operations for each parameter tensor after the backward pass: sums, norms, the optimizer, copies
(an assumption, too)."""
OPTIMIZER_BYTES = 28
"""Bytes that Adam reads and writes for each of its parameters (7 numbers in fp32)."""


@dataclass(frozen=True)
class Rates:
    """The fractions of the data sheets' rates that real runs reach, and other calibrated numbers.

    `benchmarks/plan/plan_time.py` calibrates all of these numbers.

    Attributes:
        products: The fraction of the peak rate that large products reach, on GPUs of less than 500
            TFLOP/s.
        fast_products: The same fraction on faster GPUs (Hopper, Blackwell). The power limit of
            these GPUs slows large products.
        moves: The number of times that a pass moves the inputs and outputs of the products.
        link: The fraction that runs reach of the bandwidth between the GPUs of a machine.
        network: The fraction that runs reach of the bandwidth between machines.
        hides: The fraction of the communication during computation that costs no additional time.
        interval: The 10% and 90% quantiles of measured / planned time, on the runs that were used
            for the calibration.
    """

    products: float = 0.743
    fast_products: float = 0.602
    moves: float = 4.31
    link: float = 0.471
    network: float = 0.426
    hides: float = 0.697
    interval: tuple[float, float] = (0.89, 1.24)


CALIBRATED = Rates()


@dataclass(frozen=True)
class Cluster:
    """GPUs in machines, and the network between the machines.

    Attributes:
        gpu: The kind of the GPUs.
        per_node: The number of GPUs in each machine.
        network: The network bandwidth of each machine, in Gbit/s.
    """

    gpu: Gpu
    per_node: int
    network: float

    def seconds(self, sent: float, size: int, stride: int, world: int, rates: Rates) -> float:
        """Return the seconds that each rank of a group needs to send `sent` bytes.

        All groups of the same kind send at the same time, and share the network of their machines.

        Args:
            size: The number of ranks of the group.
            stride: The difference between the numbers of neighbouring ranks of the group.
            world: The number of all ranks.
        """
        node = min(self.per_node, world)
        inside = max(1, min(size, node // stride))  # ranks of a group in a machine
        link = sent / (self.gpu.link * 1e9 * rates.link) if inside > 1 else 0.0
        if inside == size:
            return link
        return max(link, sent * (node / inside) / (self.network / 8 * 1e9 * rates.network))


@dataclass(frozen=True)
class StepTime:
    """The time of a training step in seconds, split by what the slowest rank does.

    Attributes:
        compute: The time of computing, or of waiting for the CPU that launches the operations.
        bubble: The time of waiting for other pipeline stages.
        exposed: The time of communication during which nothing is computed.
        hidden: The time of communication during computation. It is not a part of `total`.
        optimizer: The time of the optimizer's step.
    """

    compute: float
    bubble: float
    exposed: float
    hidden: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.exposed + self.optimizer


def sent_per_step(config: Config, step: Step) -> dict[str, float]:
    """Return the bytes that a rank sends in a training step, for each kind of parallelism.

    Collectives are counted as ring algorithms: in an all-reduce over D ranks, each rank sends
    2 (D - 1) / D times the bytes of the tensor.
    """
    several = config.batch.gradient_accumulation_steps
    data = sum(_data_bytes(config, step.size))
    return {"data": data} | {name: several * sent for name, sent in step.sent.items()}


def _data_bytes(config: Config, size: int) -> tuple[float, float]:
    """Return (bytes that a rank sends during the backward passes, bytes sent after these passes).

    Args:
        size: The number of the rank's parameters.
    """
    p, several = config.parallel, config.batch.gradient_accumulation_steps
    replicas = p.data_parallel_size * p.context_parallel_size
    precision = config.training.precision
    itemsize, sums = DTYPES[precision].itemsize, DTYPES[sums_in(config) or precision].itemsize
    part = size * (replicas - 1) / replicas
    # A sum (DeepSpeed sums whole buckets in stages 1 and 2, too), and a gathering. ZeRO-2 sums
    # after each micro-batch. ZeRO-3 sums slices, and gathers the weights for each forward and each
    # backward pass.
    beside = {1: 2 * sums, 2: 2 * several * sums, 3: several * (sums + 2 * itemsize)}
    after = itemsize if p.zero_stage in (1, 2) else 0
    return beside.get(p.zero_stage, 2 * sums) * part, after * part


def step_time(
    config: Config,
    step: Step,
    shape: GPTShape,
    keys: float,
    cluster: Cluster,
    rates: Rates = CALIBRATED,
) -> StepTime:
    """Return the time of a training step.

    Args:
        step: A training step of the first or the last pipeline stage.
        shape: The shape of the model.
        keys: The mean number of keys that a query sees.
        cluster: The GPUs and the network that connects them.
    """
    p, several, gpu = config.parallel, config.batch.gradient_accumulation_steps, cluster.gpu
    stages, replicas = p.pipe_parallel_size, p.data_parallel_size * p.context_parallel_size
    computes = max(_micro_batch(config, shape, keys, gpu, rates), LAUNCH * step.launches)

    def seconds(sent: float, size: int, stride: int) -> float:
        return cluster.seconds(sent, size, stride, p.world_size, rates)

    waits = seconds(step.sent.get("tensor", 0), p.model_parallel_size, 1)
    waits += seconds(
        step.sent.get("context", 0), p.context_parallel_size, p.model_parallel_size
    )  # and a stage sends activations forward and gradients back
    waits += seconds(2 * step.sent.get("pipeline", 0), stages, p.world_size // stages)
    beside, after = (
        seconds(sent, replicas, p.model_parallel_size) for sent in _data_bytes(config, step.size)
    )
    # Sums run beside backward passes, with ZeRO-1 beside the last one. Stage 3 also gathers.
    passes = {1: 2 / 3, 2: several * 2 / 3, 3: several}.get(p.zero_stage, 0)
    hidden = rates.hides * min(beside, passes * computes) if p.overlaps else 0.0
    shard = step.size / (replicas if p.zero_stage else 1)
    return StepTime(
        compute=several * computes, bubble=(stages - 1) * (computes + waits),
        exposed=several * waits + beside - hidden + after, hidden=hidden,
        optimizer=max(
            OPTIMIZER_BYTES * shard / (gpu.bandwidth * 1e9), LAUNCH * UPDATES * len(step.parameters)
        ),
    )  # fmt: skip


def _micro_batch(config: Config, shape: GPTShape, keys: float, gpu: Gpu, rates: Rates) -> float:
    """Return the seconds that the slowest stage needs to compute a micro-batch."""
    p, m, block = config.parallel, config.model, shape.block
    tp, h, heads = p.model_parallel_size, block.hidden_size, block.num_heads * block.head_size
    tokens = config.batch.train_micro_batch_size_per_gpu * m.seq_length / p.context_parallel_size
    itemsize = DTYPES[config.training.precision].itemsize
    peak = gpu.rate32 if itemsize == 4 else gpu.rate16
    rate = 1e12 * peak * (rates.fast_products if gpu.rate16 > 500 else rates.products)

    def product(inner: float, outer: float, passes: int) -> float:
        moved = passes * rates.moves * tokens * (inner + outer) + (passes + 3) * inner * outer
        waves = TILE * gpu.multiprocessors * ((passes - 2) * inner + outer)
        flop = passes * 2 * tokens * inner * outer
        return (flop + waves) / rate + itemsize * moved / (gpu.bandwidth * 1e9)

    passes = 4 if m.checkpoint_activations else 3
    wide = heads * (1 + 2 / block.group + block.output_gate) / tp
    up = block.mlp_size * (2 if block.activation in GATED else 1) / tp
    pairs = [(h, wide), (heads / tp, h), (h, up), (block.mlp_size / tp, h)]
    one = sum(product(inner, outer, passes) for inner, outer in pairs)
    one += passes * 4 * tokens * heads / tp * keys / rate
    stages, logits = p.pipe_parallel_size, product(h, shape.vocab_size / tp, 3)
    return max(ceil(m.num_layers / stages) * one, m.num_layers // stages * one + logits)
