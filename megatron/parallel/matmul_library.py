"""Multiply by a weight matrix with the faster of torch's libraries for a CPU.

torch computes fp32 products on a CPU with MKL, and convolutions with oneDNN. On AMD processors, MKL
does not use AVX-512. On such processors this module computes a product as a 1 x 1 convolution. This
takes half the time (`benchmarks/host/linear_time.py`).

In generation, x has few rows and needs no gradients. Reading the weights takes most of the time.
MKL's product of a vector and a matrix reads them at half of the memory's speed, and its product of
a batch of matrices at full speed. So up to four rows are multiplied in slices of the outputs, as a
batch (`benchmarks/host/generation_speed.py`). With 5 to 31 rows, oneDNN's own matrix product is
faster. All of these compute in fp32.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.numerics import WIDE, Numerics

IMAGES, HEIGHT = 16, 2
"""The shape of the images in each convolution. With fewer images and one thread, torch would use
MKL. With a height of 1, a compiled step would lose track of the memory format."""

FEW, SLICES = 4, 8
"""Up to FEW rows are multiplied in SLICES slices of the outputs, if these have equal sizes."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, numerics: Numerics = WIDE
) -> Tensor:
    """Return x @ weight.T + bias, [..., out], for x [..., in] and weight [out, in].

    Args:
        numerics: The rules for rounding. They decide whether the product is rounded before the bias
            is added.
    """
    if numerics.published and bias is not None:
        return linear(x, weight) + bias  # the product is rounded before
    rows = x.numel() // x.shape[-1]
    slow = PREFERS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"
    width = rows // (IMAGES * HEIGHT)
    if slow and 0 < rows < IMAGES * HEIGHT and not torch.is_grad_enabled():
        if rows <= FEW and weight.shape[0] % SLICES == 0:
            return by_slices(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if not slow or rows % (IMAGES * HEIGHT) or width < 2:
        return F.linear(x, weight, bias)
    # channels last: the values of x stay where they are
    images = x.reshape(IMAGES, HEIGHT, width, -1).permute(0, 3, 1, 2)
    found = F.conv2d(images, weight[:, :, None, None], bias)
    return found.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


def by_slices(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, computed as a batch of products: one per slice of the outputs."""
    slices = weight.unflatten(0, (SLICES, -1))
    columns = x.reshape(-1, x.shape[-1]).mT.expand(SLICES, -1, -1)
    if bias is None:
        found = torch.bmm(slices, columns)
    else:
        found = torch.baddbmm(bias.view(SLICES, -1, 1), slices, columns)
    return found.flatten(0, 1).mT.contiguous().view(*x.shape[:-1], -1)


def prefers_onednn(processors: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies matrices faster with oneDNN than with MKL.

    Args:
        processors: The file in which Linux describes the processors. Other systems do not have this
            file.
    """
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processors.exists()
        and "AuthenticAMD" in processors.read_text()
    )


PREFERS_ONEDNN = prefers_onednn()
"""Whether this process multiplies with oneDNN."""
