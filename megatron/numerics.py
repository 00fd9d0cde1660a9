"""Where numbers are rounded: one strategy, passed to all code that computes.

`WIDE` is the default: kernels, norms and softmax in fp32 at least. `PublishedNumerics` rounds
16-bit numbers where the released code rounds them, to reproduce its results (config key
`published_numerics`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Numerics:
    """Compute in fp32 at least.

    Attributes:
        published: whether numbers are rounded where the released code rounds them.
        counts_empty_step: without ZeRO, DeepSpeed's first step with zero gradients counts in Adam's
            bias correction.
    """

    published = False
    counts_empty_step = False

    @property
    def projects_master(self) -> bool:
        """Whether theta's bounds clamp the fp32 master too, not only the model's 16-bit copy."""
        return True

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of computations with inputs of `dtype`."""
        return torch.promote_types(dtype, torch.float32)

    def constant(self, value: Tensor) -> Tensor:
        """A constant (slopes, frequencies), rounded to the dtype in which it is stored."""
        return value

    def log1p(self, x: Tensor) -> Tensor:
        """log(1 + x)."""
        return torch.log1p(x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias."""
        return F.linear(x, weight, bias)


@dataclass(frozen=True)
class PublishedNumerics(Numerics):
    """Round to `dtype` after each operation, as the released code does.

    Attributes:
        dtype: of the run: bf16, fp16 or fp32.
    """

    dtype: torch.dtype
    published = True
    counts_empty_step = True

    @property
    def projects_master(self) -> bool:
        return self.dtype == torch.float32

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def constant(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).to(value)

    def log1p(self, x: Tensor) -> Tensor:
        return torch.log(1 + x)  # 1 + x is rounded too

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = F.linear(x, weight)  # rounded before the bias is added
        return product if bias is None else product + bias


WIDE = Numerics()
