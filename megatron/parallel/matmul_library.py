"""Multiply by a weight matrix with the faster of torch's two libraries for a CPU.

torch computes fp32 products on a CPU with MKL, and convolutions with oneDNN. On AMD processors, MKL
does not use AVX-512. On such processors this module computes a product as a 1 x 1 convolution. This
takes half the time (`benchmarks/host/linear_time.py`). In generation, x has few rows and needs no
gradients. There, this module uses oneDNN's own matrix product. Both libraries compute in fp32.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.numerics import WIDE, Numerics

IMAGES, HEIGHT = 16, 2
"""The shape of the images in each convolution. With fewer images and one thread, torch would use
MKL. With a height of 1, a compiled step would lose track of the memory format."""


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
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if not slow or rows % (IMAGES * HEIGHT) or width < 2:
        return F.linear(x, weight, bias)
    # channels last: the values of x stay where they are
    images = x.reshape(IMAGES, HEIGHT, width, -1).permute(0, 3, 1, 2)
    found = F.conv2d(images, weight[:, :, None, None], bias)
    return found.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


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
