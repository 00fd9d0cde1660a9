"""Host side of the fused passes: shapes, strides, grids, and the sums that follow.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, W numbers
per head that describe the kernel of distance (theta, or a table; see ``table``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron.kernels import table
from megatron.kernels.backward import key_pass, query_pass
from megatron.kernels.blocks import Blocks, Tile, choose, padded
from megatron.kernels.formula import DeviceFunctions
from megatron.kernels.forward import forward_pass

LAUNCHES: Counter[str] = Counter()
"""How often each pass has been launched in this process."""


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

    def tiles(self, q_BHTE: Tensor) -> Blocks:
        if self.blocks is not None:
            return self.blocks
        cuda = q_BHTE.is_cuda
        capability = torch.cuda.get_device_capability(q_BHTE.device) if cuda else (0, 0)
        return choose(capability, q_BHTE.dtype, q_BHTE.shape[-1])

    def scalars(self, q_BHTE: Tensor, k_BKSE: Tensor, rows_HW: Tensor) -> tuple:
        """heads, group, queries, keys, offset, width, scale, threshold, rescale."""
        heads, queries = q_BHTE.shape[1:3]
        keep = 1.0 - self.dropout_p
        return (
            *(heads, heads // k_BKSE.shape[1], queries, k_BKSE.shape[2], self.query_offset),
            *(rows_HW.shape[1], self.scale, round(keep * (1 << 24)), 1.0 / keep),
        )

    def constants(self, tile: Tile, head_size: int) -> dict:
        """Compile-time values common to the passes over tiles of M x N."""
        return {
            "DROPOUT": self.dropout_p > 0.0,
            **{"M": tile.M, "N": tile.N, "E": head_size, "P": padded(head_size)},
            **{"num_warps": tile.warps, "num_stages": tile.stages},
        }


def rows_contiguous(x: Tensor) -> Tensor:
    """The passes step through heads, sequences and positions by strides, through E one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like_heads(x_BHTE: Tensor) -> Tensor:
    """[B, H, T, E] in the memory order of [B, T, H, E], which a model wants next."""
    batch, heads, length, size = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, size).transpose(1, 2)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


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
    batch, heads, queries, size = q.shape
    out = empty_like_heads(q)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile, functions = setting.tiles(q).forward, setting.functions
    grid = (batch * heads * triton.cdiv(queries, tile.M),)
    LAUNCHES["forward_pass"] += 1
    with on_device(q):
        forward_pass[grid](
            *(q, k, v, out, lse, rows_HW, rows_HW if seed is None else seed),
            *strides(q, k, v, out),
            *setting.scalars(q, k, rows_HW),
            f_prepare=functions.prepare,
            f_evaluate=functions.evaluate,
            **setting.constants(tile, size),
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
    batch, heads, queries, size = q.shape
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
    kernel = {"f_prepare": functions.prepare, "f_evaluate": functions.evaluate}
    LAUNCHES.update(query_pass=1, key_pass=1)
    with on_device(q):
        query_pass[(programs,)](
            *(q, k, v, out, grad, dq, lse, delta, part, rows_HW, seed_or_any),
            *strides(q, k, v, out, grad, dq),
            *scalars,
            **kernel,
            **{"f_zeros": functions.zeros, "f_add": functions.add, "f_finish": functions.finish},
            THETA=columns,
            WEIGHTED=functions.weighted,
            **setting.constants(blocks.query, size),
        )
        key_pass[(batch * key_heads * triton.cdiv(keys, blocks.key.N),)](
            *(q, k, v, grad, dk, dv, lse, delta, rows_HW, seed_or_any),
            *strides(q, k, v, grad, dk, dv),
            *scalars,
            **kernel,
            WEIGHTED=functions.weighted,
            **setting.constants(blocks.key, size),
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
    batch, heads, queries, size = q.shape
    tables, seen = functions.biased + functions.weighted, setting.query_offset + queries
    groups, R = triton.cdiv(seen, tile.M), tile.M
    part = lse.new_empty(batch, heads, tables, groups, 2, R)
    constants = setting.constants(tile, size)
    del constants["M"], constants["N"]
    LAUNCHES["table_pass"] += 1
    with on_device(q):
        table.table_pass[(batch * heads * groups,)](
            *(q, k, v, grad, part, lse, delta, rows_HW, seed),
            *strides(q, k, v, grad),
            *setting.scalars(q, k, rows_HW),
            f_prepare=functions.prepare,
            f_evaluate=functions.evaluate,
            BIASED=functions.biased,
            WEIGHTED=functions.weighted,
            R=R,
            **constants,
        )
    near, far = part.sum(0).unbind(-2)  # [H, tables, G, R]: at D + e, and at D + e - R
    near[:, :, :-1] += far[:, :, 1:]
    drows = rows_HW.new_zeros(heads, tables, rows_HW.shape[1] // tables)
    drows[..., :seen] = near.flatten(2)[..., :seen]
    return drows.flatten(1)
