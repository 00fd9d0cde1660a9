"""Host side of the fused passes: shapes, strides, grids, and the sums that follow.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, W numbers
per head that describe the kernel of distance (theta, or a table; see ``table``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from megatron.kernels import tabulated as table
from megatron.kernels.backward import key_pass, query_pass
from megatron.kernels.codegen import DeviceFunctions
from megatron.kernels.forward import forward_pass
from megatron.kernels.tile_sizes import Blocks, Tile, choose, padded

LAUNCHES: Counter[str] = Counter()
"""How often each pass has been launched in this process."""


OPTIONS = {"enable_fp_fusion": True}
"""Products and sums may be fused: Triton's default, said because Triton means to change it."""


@dataclass(frozen=True)
class Setting:
    """What an attention call fixes beside its tensors.

    Attributes:
        functions: the kernel of distance.
        scale: on the products of query and key, > 0.
        query_offset: position of the first query.
        dropout_p: probability of dropping a weight.
        blocks: tile sizes; None for the committed choice.
    """

    functions: DeviceFunctions
    scale: float
    query_offset: int = 0
    dropout_p: float = 0.0
    blocks: Blocks | None = None

    @property
    def heavy(self) -> bool:
        return self.functions.heavy or self.dropout_p > 0.0

    def tiles(self, q_BHTE: Tensor) -> Blocks:
        if self.blocks is not None:
            return self.blocks
        cuda = q_BHTE.is_cuda
        capability = torch.cuda.get_device_capability(q_BHTE.device) if cuda else (0, 0)
        return choose(capability, q_BHTE.dtype, q_BHTE.shape[-1], self.heavy)

    def scalars(self, q_BHTE: Tensor, k_BKSE: Tensor, rows_HW: Tensor) -> tuple:
        """heads, group, queries, keys, offset, width, scale, threshold, rescale."""
        heads, queries = q_BHTE.shape[1:3]
        keep = 1.0 - self.dropout_p
        return (
            *(heads, heads // k_BKSE.shape[1], queries, k_BKSE.shape[2], self.query_offset),
            *(rows_HW.shape[1], self.scale, round(keep * (1 << 24)), 1.0 / keep),
        )


def constants(
    which: str,
    functions: DeviceFunctions,
    tile: Tile,
    head_size: int,
    *,
    dropout: bool,
    theta: bool,
) -> dict[str, Any]:
    """Compile-time values of a pass ("forward", "query", "key" or "table").

    Args:
        theta: whether theta's gradient is wanted (``query``).
    """
    values = {"f_prepare": functions.prepare, "f_evaluate": functions.evaluate}
    values |= {"DROPOUT": dropout, "E": head_size, "P": padded(head_size)}
    values |= {"R": tile.M} if which == "table" else {"M": tile.M, "N": tile.N}
    if which != "forward":
        values["WEIGHTED"] = functions.weighted
    if which == "table":
        values["BIASED"] = functions.biased
    if which == "query":
        values |= {"f_zeros": functions.zeros, "f_add": functions.add, "f_finish": functions.finish}
        values["THETA"] = functions.num_theta if theta else 0
    return values


def keywords(
    which: str, setting: Setting, tile: Tile, head_size: int, theta: bool
) -> dict[str, Any]:
    """Keyword arguments of a launch: compile-time values, and how to compile."""
    dropout = setting.dropout_p > 0.0
    values = constants(which, setting.functions, tile, head_size, dropout=dropout, theta=theta)
    return values | {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS


def rows_contiguous(x: Tensor) -> Tensor:
    """The passes step through heads, sequences and positions by strides, through E one by one;
    within a tile by 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(2) < 1 << 23 else x.contiguous()


def empty_like_heads(x_BHTE: Tensor) -> Tensor:
    """[B, H, T, E] in the memory order of [B, T, H, E], which a model wants next."""
    batch, heads, length, size = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, size).transpose(1, 2)


def launch(
    which: str,
    function: Any,
    programs: int,
    tile: Tile,
    setting: Setting,
    q_BHTE: Tensor,
    *args: Any,
    theta: bool = False,
) -> None:
    """Start a pass on q's device, which need not be the current one."""
    LAUNCHES[which] += 1
    options = keywords(which, setting, tile, q_BHTE.shape[-1], theta)
    with torch.cuda.device(q_BHTE.device) if q_BHTE.is_cuda else contextlib.nullcontext():
        function[(programs,)](q_BHTE, *args, **options)


def strides(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:3]]


def forward(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    rows_HW: Tensor,
    seed: Tensor | None,
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, T, E] in q's dtype, lse [B, H, T] fp32, to base 2)."""
    q, k, v = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE))
    batch, heads, queries = q.shape[:3]
    out = empty_like_heads(q)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile = setting.tiles(q).forward
    launch(
        *("forward", forward_pass, batch * heads * triton.cdiv(queries, tile.M), tile, setting),
        *(q, k, v, out, lse, rows_HW, rows_HW if seed is None else seed),
        *strides(q, k, v, out),
        *setting.scalars(q, k, rows_HW),
    )
    return out, lse


def backward(
    grad_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    rows_HW: Tensor,
    seed: Tensor | None,
    setting: Setting,
    need_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the inputs' dtype; the gradient of ``rows_HW`` in fp32, or None."""
    q, k, v, grad = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE, grad_BHTE))
    out, lse, functions = out_BHTE, lse_BHT, setting.functions
    batch, heads, queries = q.shape[:3]
    key_heads, keys = k.shape[1:3]
    dq, dk, dv = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    need_theta = need_rows and not functions.tabulated
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), torch.zeros_like(rows_HW) if need_rows else None
    blocks = setting.tiles(q)
    delta = torch.empty_like(lse)
    programs = batch * heads * triton.cdiv(queries, blocks.query.M)
    columns = functions.num_theta if need_theta else 0
    part = lse.new_empty(programs, max(1, columns))
    seed_or_any = rows_HW if seed is None else seed
    scalars = setting.scalars(q, k, rows_HW)
    launch(
        *("query", query_pass, programs, blocks.query, setting),
        *(q, k, v, out, grad, dq, lse, delta, part, rows_HW, seed_or_any),
        *strides(q, k, v, out, grad, dq),
        *scalars,
        theta=need_theta,
    )
    launch(
        *(
            "key",
            key_pass,
            batch * key_heads * triton.cdiv(keys, blocks.key.N),
            blocks.key,
            setting,
        ),
        *(q, k, v, grad, dk, dv, lse, delta, rows_HW, seed_or_any),
        *strides(q, k, v, grad, dk, dv),
        *scalars,
    )
    drows = None
    if need_theta:
        drows = part.view(batch, heads, -1, columns).sum((0, 2))
    elif need_rows:
        drows = table_gradient(q, k, v, grad, lse, delta, rows_HW, seed_or_any, setting)
    return dq, dk, dv, drows


def table_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows_HW: Tensor,
    seed: Tensor,
    setting: Setting,
) -> Tensor:
    """Gradient of a table [H, W]."""
    functions, tile = setting.functions, setting.tiles(q).table
    batch, heads, queries = q.shape[:3]
    tables, seen = functions.biased + functions.weighted, setting.query_offset + queries
    groups, R = triton.cdiv(seen, tile.M), tile.M
    part = lse.new_empty(batch, heads, tables, groups, 2, R)
    launch(
        *("table", table.table_pass, batch * heads * groups, tile, setting),
        *(q, k, v, grad, part, lse, delta, rows_HW, seed),
        *strides(q, k, v, grad),
        *setting.scalars(q, k, rows_HW),
    )
    near, far = part.sum(0).unbind(-2)  # [H, tables, G, R]: at D + e, and at D + e - R
    near[:, :, :-1] += far[:, :, 1:]
    drows = rows_HW.new_zeros(heads, tables, rows_HW.shape[1] // tables)
    drows[..., :seen] = near.flatten(2)[..., :seen]
    return drows.flatten(1)
