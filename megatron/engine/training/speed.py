"""Count the floating-point operations of training, and compare them with the device's peak rate.

The forward and backward pass of one token cost, as in appendix B of PaLM (arXiv 2204.02311),

    6 for each weight of a matrix product + 12 L H E T for attention

for L layers, H heads of size E, and T tokens. The causal mask does not halve the cost of attention.
Blocks that are computed again in the backward pass do not count twice. The model FLOPs utilization
(MFU) is the rate of these operations, divided by the peak rate.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from megatron.config import Config
from megatron.config.mlp_width import GATED
from megatron.engine.gpus import gpu_of_device
from megatron.model.shape import GPTShape
from megatron.parallel.groups import Groups


@dataclass(frozen=True)
class Speed:
    """The numbers with which tokens per second are converted into TFLOP/s and MFU.

    Attributes:
        flops_per_token: The floating-point operations of one token, forward and backward.
        devices: The number of devices that share the work.
        peak_tflops: The peak TFLOP/s of one device; None if it is not known.
    """

    flops_per_token: float = 0.0
    devices: int = 1
    peak_tflops: float | None = None

    def metrics(self, tokens_per_second: float, device: torch.device) -> dict[str, float]:
        """Return the TFLOP/s of each device, the MFU if the peak is known, and the peak memory."""
        tflops = tokens_per_second * self.flops_per_token / self.devices / 1e12
        mfu = {"train/mfu": tflops / self.peak_tflops} if self.peak_tflops else {}
        return {"train/tflops_per_device": tflops, **mfu, "train/memory_gb": _peak_memory(device)}


def speed_of(config: Config, shape: GPTShape, groups: Groups) -> Speed:
    """Return the operations of one token of a run, and the peak rate of its devices."""
    return Speed(
        flops_per_token=flops_per_token(shape, config.model.seq_length),
        devices=groups.world_size,
        peak_tflops=config.logging.peak_theoretical_tflops
        or known_peak(groups.device, config.training.precision),
    )


def flops_per_token(shape: GPTShape, length: int) -> float:
    """Return the operations of one token of a sequence of `length` tokens, forward and backward."""
    b = shape.block
    attention = 2 * b.hidden_size**2 * (1 + 1 / b.group)
    mlp = b.hidden_size * b.mlp_size * (3 if b.activation in GATED else 2)
    weights = shape.num_layers * (attention + mlp) + shape.vocab_size * b.hidden_size
    return 6 * weights + 12 * shape.num_layers * b.hidden_size * length


def known_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak TFLOP/s of a known GPU in 16-bit precision, otherwise None."""
    if device.type != "cuda" or precision == "fp32":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return gpu.rate16 if gpu else None


def _peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GB: of its tensors on a GPU, otherwise of all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
