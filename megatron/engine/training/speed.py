"""Count the floating-point operations of training, and compare them with the device's peak rate.

As in appendix B of PaLM (arXiv 2204.02311), the number of operations in the forward and backward
pass of one token is

    6 for each weight of a matrix product + 12 L H E K for attention

for L layers, H heads of size E, and K keys that a query sees. The causal mask does not halve the
cost of attention: K is the number of tokens in the sequence. With a window of W earlier tokens, K
is W + 1 at most. If tokens see only their own document, K is at most the length of the piece of the
document that lies in the sequence.

A block that is recomputed in the backward pass does not count twice. The model FLOPs utilization
(MFU) is the rate of these operations, divided by the peak rate.
"""

import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from megatron.config import Config
from megatron.config.mlp_width import GATED
from megatron.config.per_layer import layers_of
from megatron.engine.gpus import gpu_of_device
from megatron.model.shape import GPTShape
from megatron.parallel.groups import Groups

MOST_DOCUMENTS = 10**6
"""How many documents of a corpus are measured."""


@dataclass(frozen=True)
class Speed:
    """The numbers that convert a speed in tokens per second into TFLOP/s and MFU.

    Attributes:
        flops_per_token: Maps each length of sequences to the number of floating-point operations of
            one token, forward and backward.
        devices: The number of devices that share the work.
        peak_tflops: The peak TFLOP/s of one device; None if it is not known.
    """

    flops_per_token: Mapping[int, float]
    devices: int
    peak_tflops: float | None

    def metrics(
        self, tokens_per_second: float, lengths: Sequence[int], device: torch.device
    ) -> dict[str, float]:
        """Return each device's TFLOP/s, the MFU if the peak rate is known, and the peak memory.

        Args:
            lengths: The length of the sequences in each measured step.
        """
        flops = fmean(self.flops_per_token[length] for length in lengths)
        tflops = tokens_per_second * flops / self.devices / 1e12
        mfu = {"train/mfu": tflops / self.peak_tflops} if self.peak_tflops else {}
        return {"train/tflops_per_device": tflops, **mfu, "train/memory_gb": _peak_memory(device)}


Corpora = Sequence[tuple[np.ndarray, float]]
"""The lengths of the documents of each corpus, and the corpus's weight."""


def speed_of(config: Config, shape: GPTShape, groups: Groups, corpora: Corpora) -> Speed:
    """Return the operations per token of a run, and the number and peak rate of its devices."""
    lengths = {config.model.seq_length, *(length for _, length in config.training.curriculum)}
    flops = {
        each: flops_per_token(shape, keys_per_query(config, corpora, each)) for each in lengths
    }
    return Speed(
        flops_per_token=flops,
        devices=groups.world_size,
        peak_tflops=config.logging.peak_theoretical_tflops
        or known_peak(groups.device, config.training.precision),
    )


def mean_keys(config: Config) -> float:
    """Return the mean number of keys that a query sees, over all steps, queries and layers."""
    steps = max(1, config.training.train_iters)
    stages = config.training.curriculum or ((0, config.model.seq_length),)
    counts = np.diff([*(min(step, steps) for step, _ in stages), steps])
    keys = [keys_per_query(config, length=length) for _, length in stages]
    return float(np.average(keys, weights=counts))


def keys_per_query(config: Config, corpora: Corpora = (), length: int | None = None) -> float:
    """Return the mean number of keys that a query sees, over all queries and layers.

    Args:
        corpora: The document lengths and the weight of each training corpus. Without
            `reset_attention_mask` in the config, or without a corpus, each sequence counts as one
            document.
        length: The length of the sequences. The default is the config's `seq_length`.
    """
    m = config.model
    length = length or m.seq_length
    texts = [(lengths[:MOST_DOCUMENTS], weight) for lengths, weight in corpora]
    texts = [each for each in texts if m.reset_attention_mask and each[0].any()]
    texts = texts or [(np.array([length]), 1.0)]
    pieces = [(_pieces(lengths, length), weight) for lengths, weight in texts]
    total = sum(weight for _, weight in pieces)
    windows = Counter(layers_of(m.sliding_window_width, m.num_layers))
    keys = 0.0
    for window, layers in windows.items():
        most = length if window is None else window + 1
        for piece, weight in pieces:
            mean = (piece * np.minimum(piece, most)).sum() / piece.sum()
            keys += layers * weight / total * float(mean)
    return keys / m.num_layers


def _pieces(documents: np.ndarray, length: int) -> np.ndarray:
    """Cut concatenated documents into sequences of `length` tokens, and return the piece lengths.

    A piece is the part of one document that lies in one sequence.

    Args:
        documents: The length of each document in tokens.
    """
    ends = documents.cumsum(dtype=np.int64)
    cuts = np.union1d(ends, np.arange(length, ends[-1], length))
    return np.diff(cuts, prepend=0)


def flops_per_token(shape: GPTShape, keys: float) -> float:
    """Return the floating-point operations of one token, forward and backward.

    Args:
        keys: The mean number of keys that a query sees (see `keys_per_query`).
    """
    b = shape.block
    heads = b.num_heads * b.head_size
    attention = b.hidden_size * heads * (2 + 2 / b.group + b.output_gate)
    mlp = b.hidden_size * b.mlp_size * (3 if b.activation in GATED else 2)
    weights = shape.num_layers * (attention + mlp) + shape.vocab_size * b.hidden_size
    return 6 * weights + 12 * shape.num_layers * heads * keys


def known_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak 16-bit TFLOP/s of a GPU, or None if unknown or if `precision` is fp32."""
    if device.type != "cuda" or precision == "fp32":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return gpu.rate16 if gpu else None


def _peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GB.

    On a GPU, this is the memory of the tensors there. Otherwise, it is all memory of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
