"""Define the rotary embedding, which rotates queries and keys by their positions, as in GPT-NeoX.

Su et al. 2021 (arXiv 2104.09864). Only the first R (`rotary_ndims`) of the E head dimensions
rotate. Dimension m is paired with dimension m + R/2, for m = 0 ... R/2 - 1. At position t, this
pair is rotated by the angle phi = t base^(-2m/R):

    x'_m = x_m cos phi - x_{m+R/2} sin phi        x'_{m+R/2} = x_{m+R/2} cos phi + x_m sin phi

Angles and products are computed in fp32, or in fp64 for fp64 inputs. Frequencies are rounded to
fp32 even for fp64 inputs, as in a GPT-NeoX model that was cast to fp64. The result has the dtype of
the input.

To process sequences longer than the pretraining length L, the frequencies f_m = base^(-2m/R) can be
scaled by a factor s, in one of these ways (names as in Hugging Face's transformers):

    linear   f_m / s                                 Chen et al. 2023 (arXiv 2306.15595)
    ntk      (base s^(R / (R - 2)))^(-2m/R)
    yarn     f_m (1 - r_m + r_m / s)                 Peng et al. 2023 (arXiv 2309.00071)
    llama3   f_m (1 - r_m + r_m / s)                 Llama 3.1

The ramp r_m is 0 for high frequencies and 1 for low frequencies. Let n_m = L f_m / (2 pi) be the
number of turns in L positions. In `yarn`, r_m rises linearly in m, from 0 where n_m = `beta_fast`
to 1 where n_m = `beta_slow`. Also, rotated numbers are multiplied by `attention_factor`, by default
0.1 ln(s) + 1. In `llama3`, r_m falls linearly in n_m, from 1 where n_m = `low_freq_factor` to 0
where n_m = `high_freq_factor`.

Legend: B batch, H heads, T positions, E head size.
"""

import math

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError


def frequencies(dim: int, base: float, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return base^(-2m/dim) for m = 0 ... dim/2 - 1, rounded to fp32 and then cast to `dtype`."""
    if dim % 2:
        raise PositionalError(f"positions are encoded in pairs of dimensions, {dim} is odd")
    exponent = torch.arange(0, dim, 2, device=device).float() / dim
    return (1.0 / base**exponent).to(dtype)


class Rotary(PositionalEmbedding):
    """Rotary embedding, which rotates queries and keys by their positions.

    Args:
        rope_type: How the frequencies are scaled: `default` (not at all), `linear`, `ntk`, `yarn`
            or `llama3`.
        factor: The scaling factor, at least 1. It is usually the new length divided by the
            pretraining length.
        original_max_position_embeddings: The pretraining length, for `yarn` and `llama3`.
        beta_fast, beta_slow: Numbers of turns within the pretraining length. `yarn` does not change
            frequencies with more than `beta_fast` turns. It divides frequencies with fewer than
            `beta_slow` turns by `factor`.
        attention_factor: The number by which `yarn` multiplies the rotated numbers. 0 means 0.1
            ln(factor) + 1.
        low_freq_factor, high_freq_factor: Numbers of turns within the pretraining length. `llama3`
            does not change frequencies with more than `high_freq_factor` turns. It divides
            frequencies with fewer than `low_freq_factor` turns by `factor`.
    """

    def __init__(
        self,
        rope_type: str = "default",
        factor: float = 1.0,
        original_max_position_embeddings: int = 0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float = 0.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        *,
        numerics: Numerics = WIDE,
    ):
        super().__init__(numerics)
        known = ("default", "linear", "ntk", "yarn", "llama3")
        if rope_type not in known:
            raise PositionalError(f"rope_type {rope_type!r} is none of {', '.join(known)}")
        if factor < 1 or (rope_type == "default" and factor != 1):
            raise PositionalError(f"factor {factor}: {rope_type} takes no such factor")
        length = original_max_position_embeddings
        if rope_type in ("yarn", "llama3") and length < 7:  # less than a turn
            raise PositionalError(f"{rope_type} needs original_max_position_embeddings")
        self.rope_type, self.factor, self.length = rope_type, factor, length
        self.turns = (beta_fast, beta_slow)
        self.low_high = (low_freq_factor, high_freq_factor)
        self.gain = 1.0
        if rope_type == "yarn":
            self.gain = attention_factor or 0.1 * math.log(factor) + 1.0

    def frequencies(
        self, ndims: int, base: float, dtype: torch.dtype, device: torch.device | None
    ) -> Tensor:
        """Return the scaled frequencies [ndims / 2] of `ndims` rotating dimensions."""
        if self.rope_type == "ntk":
            base = base * self.factor ** (ndims / max(1, ndims - 2))
        f_R = frequencies(ndims, base, dtype, device)
        if self.rope_type == "linear":
            return f_R / self.factor
        if self.rope_type == "yarn":
            places = (
                ndims * math.log(self.length / (2 * math.pi * turns)) / (2 * math.log(base))
                for turns in self.turns
            )
            low, high = max(0, math.floor(next(places))), min(ndims - 1, math.ceil(next(places)))
            m_R = torch.arange(ndims // 2, dtype=dtype, device=device)
            ramp_R = ((m_R - low) / max(high - low, 0.001)).clamp(0, 1)
        elif self.rope_type == "llama3":
            low, high = self.low_high
            ramp_R = 1 - ((self.length * f_R / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        else:
            return f_R
        return f_R * (1 - ramp_R) + f_R / self.factor * ramp_R

    def turn(
        self, x_BHTE: Tensor, positions_BT: Tensor, rotary_ndims: int | None, base: float
    ) -> Tensor:
        size = x_BHTE.shape[-1]
        ndims = size if rotary_ndims is None else rotary_ndims
        if ndims > size:
            raise PositionalError(f"rotary_ndims is {ndims}, but a head has {size} dimensions")
        dtype, device = self.numerics.working_dtype(x_BHTE.dtype), x_BHTE.device
        turns = self.numerics.constant(self.frequencies(ndims, base, dtype, device))
        position_B1T1 = positions_BT[:, None, :, None].to(dtype)
        if self.distance_scale != 1.0:
            position_B1T1 = self.distance_scale * position_B1T1
        angle_B1TR = position_B1T1 * turns
        cos, sin = angle_B1TR.cos(), angle_B1TR.sin()
        if self.gain != 1.0:
            cos, sin = self.gain * cos, self.gain * sin
        rotated, kept = x_BHTE.split([ndims, size - ndims], dim=-1)
        x1, x2 = rotated.to(dtype).chunk(2, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BHTE.dtype)
        return torch.cat((rotated, kept), dim=-1) if ndims < size else rotated
