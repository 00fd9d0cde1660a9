"""Check the parity case `kernels`: the outputs of single positional embeddings.

The outputs are compared in fp32, and in bf16 with the rounding of the published code. The file
probes.npz contains these arrays for each embedding KIND, DTYPE and sequence length n. An example of
a name is `kerple_log/float32/L512`.

    KIND/DTYPE/L<n>               [heads, n]  attention scores of the last query, for the distances
                                              n-1 to 0. Without the embedding all scores would be 0,
                                              or 1 if the embedding multiplies scores
    KIND/DTYPE/param/NAME                     the parameters that were used
    alibi/DTYPE/slopes            [heads]     the slopes
    sinusoidal/DTYPE/L<n>...      [n, dim]    the table of position vectors
    rotary/DTYPE/cos<n>, sin<n>   [n, dim]    cosines and sines, whose two halves are equal

The errors of scores are relative to the greatest absolute score of the head. The errors of slopes
are relative to each slope. All other errors are absolute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.config.choices import positional_name
from megatron.engine.neox import layout
from megatron.numerics import WIDE, PublishedNumerics
from megatron.positional import PositionalEmbedding, load, within_bounds
from megatron.positional.rotary import Rotary
from megatron.positional.sinusoidal import Sinusoidal
from tests.parity.case_files import read_arrays
from tests.parity.result import Result

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def check_kernels(folder: Path, name: str) -> Iterator[Result]:
    """Check probes.npz, and yield one result for each embedding and dtype in the file."""
    probes = read_arrays(folder / "probes.npz")
    for start in dict.fromkeys("/".join(key.split("/")[:2]) for key in probes):
        inner = {k.removeprefix(start + "/"): v for k, v in probes.items() if k.startswith(start)}
        kind, dtype = start.split("/")
        yield check_kind(kind, getattr(torch, dtype), inner, Result(f"{name} {kind} {dtype}"))


def check_kind(
    kind: str, dtype: torch.dtype, probes: dict[str, np.ndarray], result: Result
) -> Result:
    """Compare all arrays of one embedding in one dtype.

    Args:
        kind: The name of the embedding in the published code.
        dtype: The dtype in which the published code computed.
        probes: The arrays by name, such as `L512`. The prefix `KIND/DTYPE/` is removed.
        result: The result to complete and return.
    """
    numerics = WIDE if dtype == torch.float32 else PublishedNumerics(dtype)
    pos = load(positional_name(kind), numerics=numerics)
    tolerance = TOLERANCES[dtype]
    for key, published in probes.items():
        length = int((re.search(r"\d+", key) or [0])[0])
        if key.startswith("param/"):
            continue
        if key == "slopes":
            slopes = pos.numerics.constant(pos.initial_theta(len(published)))[:, 0]
            result.compare("slopes", slopes.numpy(), published, tolerance, scale=published)
        elif pos.has("distance"):
            row = last_row(pos, probes, length, dtype)
            scale = np.abs(published).max(axis=1, keepdims=True)
            result.compare(f"L{length}", row.float().numpy(), published, tolerance, scale=scale)
        elif isinstance(pos, Sinusoidal):
            table = pos.table(torch.arange(length), published.shape[1], dtype)
            result.compare(f"L{length}", table.float().numpy(), published, tolerance)
        elif isinstance(pos, Rotary):
            table = angles(pos, length, published.shape[1], dtype)["cos" if "cos" in key else "sin"]
            result.compare(key, table.float().numpy(), published, tolerance)
        else:
            result.faults.append(f"{key}: cannot be compared with {pos.name}")
    return result


def last_row(
    pos: PositionalEmbedding, probes: dict[str, np.ndarray], length: int, dtype: torch.dtype
) -> Tensor:
    """Apply an embedding to constant scores, and return the last query's scores [heads, length].

    The constant is one if the embedding multiplies scores by a weight, otherwise zero.
    """
    params = {
        layout.RPE + key.removeprefix("param/"): torch.from_numpy(value)
        for key, value in probes.items()
        if key.startswith("param/")
    }
    d = torch.arange(length - 1, -1, -1)
    if layout.RPE + layout.TABLE in params:
        # T5's table is multiplied by a factor, which is sqrt(head size) in a model. The case lacks
        # that factor, so the factor is computed from the score at distance 0, which is bucket 0.
        theta_HN, _ = layout.theta_from_columns(params)
        shown = torch.from_numpy(probes[f"L{length}"])[:, -1]
        ratio = float((shown / theta_HN[:, 0]).median())
        root = round(ratio**2) ** 0.5
        scale = root if abs(root - ratio) < 1e-2 * ratio else round(ratio, 3)
        buckets = theta_HN.shape[1]
        pos = load(pos.name, numerics=pos.numerics, num_buckets=buckets, scale=scale)
    elif pos.learnable:
        columns = [params[layout.RPE + p.name].flatten() for p in pos.parameters]
        theta_HN = torch.stack(columns, dim=1)
    else:
        theta_HN = pos.numerics.constant(pos.initial_theta(len(probes[f"L{length}"])))
    theta_HN = within_bounds(theta_HN, pos.parameters).to(dtype)
    bias, weight = pos.bias(theta_HN, d), pos.weight(theta_HN, d)
    if bias is None:
        assert weight is not None, "a distance kernel has a bias, a weight or both"
        return weight
    return bias if weight is None else weight + bias


def angles(pos: Rotary, length: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the rotary embedding's cosines and sines [length, dim], with the keys `cos` and `sin`.

    Rotating the vector (1, 0) in each plane of two dimensions gives (cosine, sine) of the angle.
    """
    half = dim // 2
    plane = torch.cat((torch.ones(1, 1, length, half), torch.zeros(1, 1, length, half)), dim=-1)
    turned, _ = pos.rotate(plane.to(dtype), plane.to(dtype), offset=0, rotary_ndims=dim, base=10000)
    cos, sin = turned[0, 0].chunk(2, dim=-1)
    return {"cos": cos.repeat(1, 2), "sin": sin.repeat(1, 2)}
