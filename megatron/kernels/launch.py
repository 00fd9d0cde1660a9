"""Launch the Triton kernels of fused attention, and add up their partial sums.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, W numbers
per head that describe the distance kernel, a bias or factor that depends only on the query-key
distance. These numbers are the parameters theta, or a table over distances (see `tabulated`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.backward import key_pass, query_pass
from megatron.kernels.codegen import DeviceFunctions
from megatron.kernels.forward import forward_pass
from megatron.kernels.hidden import Layer, hidden_pass
from megatron.kernels.tabulated import table_pass
from megatron.kernels.terms import NO_TERMS, TENSORS, Terms
from megatron.kernels.tile_sizes import Tile, TileSizes, choose, padded

PASSES: dict[str, Any] = {"forward": forward_pass, "query": query_pass, "key": key_pass}
PASSES |= {"table": table_pass, "hidden": hidden_pass}

LAUNCHES: Counter[str] = Counter()
"""How often each Triton kernel has been launched in this process."""

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options: products and sums may be fused, whatever Triton's default is."""


@dataclass(frozen=True)
class Setting:
    """The parameters of an attention call that are not tensors.

    Attributes:
        functions: The device functions of the distance kernel.
        scale: The factor of the query-key products, > 0.
        query_offset: The position of the first query.
        dropout_p: The probability of dropping a softmax weight.
        tile_sizes: The tile sizes, or None for those in `tile_sizes.TABLE`.
        terms: Whether there are documents, a window, a sink or a decay.
    """

    functions: DeviceFunctions
    scale: float
    query_offset: int = 0
    dropout_p: float = 0.0
    tile_sizes: TileSizes | None = None
    terms: bool = False

    def tiles(self, q_BHTE: Tensor) -> TileSizes:
        if self.tile_sizes is not None:
            return self.tile_sizes
        cuda = q_BHTE.is_cuda
        capability = torch.cuda.get_device_capability(q_BHTE.device) if cuda else (0, 0)
        needs = self.functions.needs(self.dropout_p > 0.0, self.terms)
        return choose(capability, q_BHTE.dtype, q_BHTE.shape[-1], *needs)

    def numbers(self, q_BHTE: Tensor, k_BKSE: Tensor, rows_HW: Tensor) -> dict[str, int | float]:
        """Return a dictionary of the numeric arguments that all Triton kernels share."""
        heads, queries = q_BHTE.shape[1:3]
        keep = 1.0 - self.dropout_p
        return {
            "heads": heads,
            "group": heads // k_BKSE.shape[1],
            "queries": queries,
            "keys": k_BKSE.shape[2],
            "offset": self.query_offset,
            "width": rows_HW.shape[1],
            "scale": self.scale,
            "threshold": round(keep * (1 << 24)),
            "rescale": 1.0 / keep,
        }


def constants(
    which: str, functions: DeviceFunctions, tile: Tile, head_size: int,
    *, dropout: bool, theta: bool, terms: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of a Triton kernel.

    Args:
        which: The Triton kernel: "forward", "query", "key", "table" or "hidden".
        theta: Whether the gradient of the distance kernel's parameters or table is needed. This
            affects only "query".
        terms: The names, from `terms.TENSORS`, of the tensors that the call passes. The pointers
            to the other tensors in `terms.TENSORS` are None.
    """
    values: dict[str, Any] = {f"{name}_ptr": None for name in absent(which, terms)}
    values |= {"f_prepare": functions.prepare, "f_evaluate": functions.evaluate}
    values |= {"DROPOUT": dropout, "E": head_size, "P": padded(head_size)}
    values |= {"R": tile.M} if which == "table" else {"M": tile.M, "N": tile.N}
    if which not in ("forward", "hidden"):
        values["WEIGHTED"] = functions.weighted
    if which == "hidden" and (layer := functions.layer) is not None:
        values |= {"FIRST": layer.first, "K": layer.width, "R": layer.padded}
    if which == "table":
        values["BIASED"] = functions.biased
    if which == "query":
        values |= {"f_zeros": functions.zeros, "f_add": functions.add, "f_finish": functions.finish}
        theta_or_term = theta or not {"sink", "high"}.isdisjoint(terms)
        values |= {"LEARNS": theta_or_term, "THETA": functions.num_theta if theta else 0}
    return values


def absent(which: str, terms: Iterable[str]) -> set[str]:
    """Return the names of a Triton kernel's optional tensors that a call does not pass.

    The argument `terms` holds the names of the optional tensors that the call passes. The list
    `TENSORS` of the module `terms` holds the names of all optional tensors.
    """
    known = {name for name in TENSORS if f"{name}_ptr" in PASSES[which].arg_names}
    return known - set(terms)


def rows_contiguous(x: Tensor) -> Tensor:
    """Return `x` if the Triton kernels can address it, otherwise a contiguous copy.

    The last dimension must be contiguous, and offsets within a tile must fit into 32 bits. The
    strides of sequences and heads are arbitrary.
    """
    return x if x.stride(-1) == 1 and x.stride(2) < 1 << 23 else x.contiguous()


def empty_like_heads(x_BHTE: Tensor) -> Tensor:
    """Return an empty tensor with the shape [batch, heads, queries, head size] of `x_BHTE`.

    In memory, queries come before heads, because the model's next layer needs this order.
    """
    batch, heads, length, size = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, size).transpose(1, 2)


def launch(
    which: str, programs: int, tile: Tile, setting: Setting, tensors: dict[str, Tensor],
    *, need_theta: bool = False,
) -> None:  # fmt: skip
    """Launch a Triton kernel on the tensors' device, which need not be the current device.

    Args:
        which: The Triton kernel, a key of `PASSES`.
        need_theta: Whether the gradient of the distance kernel's parameters or table is needed.
        tensors: Maps names to tensors. For example, the tensor `q` provides the Triton kernel's
            arguments `q_ptr`, `q_b`, `q_h` and `q_t`.
    """
    LAUNCHES[which] += 1
    q, rows_HW = tensors["q"], tensors["theta"]
    unread = set(TENSORS) - absent(which, ())
    tensors = {name: x for name, x in tensors.items() if name not in unread}
    arguments = pointers_and_strides(tensors) | setting.numbers(q, tensors["k"], rows_HW)
    dropout = setting.dropout_p > 0.0
    arguments |= constants(
        which, setting.functions, tile, q.shape[-1],
        dropout=dropout, theta=need_theta, terms=tensors,
    )  # fmt: skip
    arguments |= {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        start(PASSES[which], programs, arguments)


def start(function: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Start a Triton kernel. On the meta device there are no values, and nothing is started.

    `benchmarks/attention_tiles.py` replaces this function by one that only compiles the kernel.
    """
    if not arguments["q_ptr"].is_meta:
        function[(programs,)](**arguments)


def cdiv(count: int, size: int) -> int:
    """Return how many tiles of `size` elements cover `count` elements."""
    return -(-count // size)


def pointers_and_strides(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a Triton kernel that describe `tensors`.

    A tensor named x gives the argument `x_ptr`. If x has four dimensions, the strides of the first
    three are the arguments `x_b`, `x_h` and `x_t`.
    """
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        arguments[f"{name}_ptr"] = x
        if x.dim() == 4:
            arguments[f"{name}_b"], arguments[f"{name}_h"], arguments[f"{name}_t"], _ = x.stride()
    return arguments


def forward(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor,
    rows_HW: Tensor, seed: Tensor | None, setting: Setting, terms: Terms = NO_TERMS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention output, and `lse` for the backward pass.

    The output is [batch, heads, queries, head size] in q's dtype. `lse` [batch, heads, queries]
    holds the softmax's denominators, as logarithms to base 2 in fp32. `rows_HW` has one row of
    numbers per head: the distance kernel's parameters or a table over distances.
    """
    q, k, v = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE))
    batch, heads, queries = q.shape[:3]
    out = empty_like_heads(q)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile = setting.tiles(q).forward
    programs = batch * heads * cdiv(queries, tile.M)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "theta": rows_HW}
    tensors["seed"] = rows_HW if seed is None else seed  # without dropout no seed is read
    tensors |= terms.tensors(setting.scale)
    launch("forward", programs, tile, setting, tensors)
    return out, lse


def backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, out_BHTE: Tensor,
    lse_BHT: Tensor, rows_HW: Tensor, seed: Tensor | None, setting: Setting, need_rows: bool,
    terms: Terms = NO_TERMS,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, `rows_HW`, the sink and the decay.

    `rows_HW` has one row of numbers per head: the distance kernel's parameters or a table over
    distances. The gradients of q, k and v have the inputs' dtype. The gradient of `rows_HW` is
    fp32, or None if `need_rows` is false.
    """
    q, k, v, grad = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE, grad_BHTE))
    functions = setting.functions
    batch, heads, queries = q.shape[:3]
    key_heads, keys = k.shape[1:3]
    dq, dk, dv = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    if q.numel() == 0:
        drows = torch.zeros_like(rows_HW) if need_rows else None
        return dq, dk.zero_(), dv.zero_(), drows, *terms.zeros()
    tiles, delta = setting.tiles(q), torch.empty_like(lse_BHT)
    need_theta = need_rows and not functions.tabulated
    columns = functions.num_theta if need_theta else 0
    programs = batch * heads * cdiv(queries, tiles.query.M)
    sums = lse_BHT.new_empty(programs, max(1, columns))
    shared = {"q": q, "k": k, "v": v, "do": grad, "lse": lse_BHT, "delta": delta, "theta": rows_HW}
    shared["seed"] = rows_HW if seed is None else seed  # as in `forward`
    shared |= terms.tensors(setting.scale)
    tensors = shared | {"out": out_BHTE, "dq": dq, "sums": sums}
    launch("query", programs, tiles.query, setting, tensors, need_theta=need_rows)
    programs = batch * key_heads * cdiv(keys, tiles.key.N)
    of_keys = {"dk": dk, "dv": dv} | terms.of_keys(keys)
    launch("key", programs, tiles.key, setting, shared | of_keys)
    drows = None
    if need_theta:
        drows = sums.view(batch, heads, -1, columns).sum((0, 2))
        if functions.layer is not None:
            drows = hidden_gradient(setting, shared, functions.layer, drows)
    elif need_rows:
        drows = table_gradient(setting, shared)
    ddecay = of_keys.get("ddecay")
    return dq, dk, dv, drows, *terms.gradients(lse_BHT, delta, ddecay, setting.query_offset)


def hidden_gradient(
    setting: Setting, tensors: dict[str, Tensor], layer: Layer, plain_HN: Tensor
) -> Tensor:
    """Return the gradient of `rows_HW` of a distance kernel with a layer of hidden units.

    Args:
        tensors: The tensors that all Triton kernels of the backward pass share.
        plain_HN: The gradient of the columns of theta that are not in the layer.
    """
    q, rows_HW = tensors["q"], tensors["theta"]
    tile, heads = setting.tiles(q).query, q.shape[1]
    programs = len(q) * heads * cdiv(q.shape[2], tile.M)
    sums = tensors["lse"].new_empty(programs, 2, layer.padded)
    launch("hidden", programs, tile, setting, tensors | {"sums": sums})
    by_head = sums.view(len(q), heads, -1, 2, layer.padded).sum((0, 2))
    drows_HW = layer.gradient(by_head, rows_HW.shape[1])
    drows_HW[:, layer.others] = plain_HN
    return drows_HW


def table_gradient(setting: Setting, tensors: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the table over distances, [heads, numbers per head].

    Args:
        tensors: The tensors that all Triton kernels of the backward pass share.
    """
    q, rows_HW = tensors["q"], tensors["theta"]
    functions, tile = setting.functions, setting.tiles(q).table
    batch, heads, queries = q.shape[:3]
    tables, seen = functions.biased + functions.weighted, setting.query_offset + queries
    groups, R = cdiv(seen, tile.M), tile.M
    sums = tensors["lse"].new_empty(batch, heads, tables, groups, 2, R)
    launch("table", batch * heads * groups, tile, setting, tensors | {"sums": sums})
    near, far = sums.sum(0).unbind(-2)  # [H, tables, G, R]: at D + e, and at D + e - R
    near[:, :, :-1] += far[:, :, 1:]
    drows = rows_HW.new_zeros(heads, tables, rows_HW.shape[1] // tables)
    drows[..., :seen] = near.flatten(2)[..., :seen]
    return drows.flatten(1)
