"""Define sinusoidal position vectors that are added to the token embedding, in GPT-NeoX's layout.

Vaswani et al. 2017 (arXiv 1706.03762). All sines precede all cosines (they are not interleaved).
With hidden size D:

    table[t] = (sin(t f_0), ..., sin(t f_{D/2-1}), cos(t f_0), ..., cos(t f_{D/2-1}))
    f_m = 10000^(-2m/D)
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.rotary import frequencies


class Sinusoidal(PositionalEmbedding):
    """Sinusoidal position vectors. They have no parameters and are defined at every position."""

    def table(self, positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return position vectors [*positions.shape, dim] in `dtype`, but at least in fp32."""
        dtype = self.numerics.working_dtype(dtype)
        # Rounded to fp32 even for fp64, as in a GPT-NeoX model that was cast to fp64.
        frequency = self.numerics.constant(frequencies(dim, 10000.0, dtype, positions.device))
        angle = positions.to(dtype)[..., None] * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
