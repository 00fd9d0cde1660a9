"""Launch the Triton kernels of fused attention, and add up their partial sums.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, W numbers
per head that describe the distance kernel, a bias or factor that depends only on the query-key
distance. These numbers are the parameters theta, or a table over distances (see `tabulated`).
"""

import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron.kernels.compiled_variants import order, variant_of
from megatron.kernels.decode import CHUNK
from megatron.kernels.device_functions import DeviceFunctions
from megatron.kernels.documents_sink_decay import NO_TERMS, Terms
from megatron.kernels.hidden_layer import Layer
from megatron.kernels.tile_sizes import Tile, TileSizes, choose, few_rows

LAUNCHES: Counter[str] = Counter()
"""How often each Triton kernel has been launched in this process."""

FILL = 1024
"""The number of programs of `key_pass` that fill a GPU.

A GPU has 108 (A100) or 132 (H200) multiprocessors, with one or two programs at a time. The first
keys of a sequence are seen by all queries, the last ones by few, so programs differ in length. With
about four programs for each place, few places wait for the longest programs."""

FEW, MANY = 64, 1024
"""Up to FEW query rows of a key head divide more than MANY keys into parts. Fewer keys take less
time (9 microseconds, predicted for an H100 and head size 128) than the host needs for a launch."""


@dataclass(frozen=True)
class Setting:
    """The arguments of an attention call that are not tensors.

    Attributes:
        functions: The device functions that compute the positional embedding.
        scale: The positive number that multiplies the query-key products.
        query_offset: The position of the first query.
        dropout_p: The probability of dropping a softmax weight.
        tile_sizes: The tile sizes of the Triton kernels. None means the defaults for the GPU.
        backward: Whether a backward pass may follow.
    """

    functions: DeviceFunctions
    scale: float
    query_offset: int = 0
    dropout_p: float = 0.0
    tile_sizes: TileSizes | None = None
    backward: bool = True

    def tiles(self, q_BHTE: Tensor, terms: Terms = NO_TERMS) -> TileSizes:
        """Return the tile sizes of all Triton kernels for an attention call with these inputs."""
        if self.tile_sizes is not None:
            return self.tile_sizes
        capability = capability_of(q_BHTE.device) if q_BHTE.is_cuda else (0, 0)
        needs = self.functions.needs(self.dropout_p > 0.0, terms.cost_registers)
        return choose(capability, q_BHTE.dtype, q_BHTE.shape[-1], needs)

    def numbers(self, q_BHTE: Tensor, k_BKSE: Tensor, rows_HW: Tensor) -> tuple[int | float, ...]:
        """Return the numeric arguments that all Triton kernels share, in order."""
        heads, queries = q_BHTE.shape[1:3]
        key_heads, keys = k_BKSE.shape[1:3]
        keep = 1.0 - self.dropout_p
        sizes = (heads, heads // key_heads, queries, keys, self.query_offset, rows_HW.shape[1])
        return *sizes, float(self.scale), round(keep * (1 << 24)), 1.0 / keep


capability_of = lru_cache(torch.cuda.get_device_capability)
"""Returns the compute capability of a GPU."""


def rows_contiguous(x: Tensor) -> Tensor:
    """Return x if the Triton kernels can read it in place, otherwise a contiguous copy."""
    # The last dimension must be contiguous, and offsets within a tile must fit into 32 bits. The
    # strides of sequences and heads are arbitrary.
    return x if x.stride(-1) == 1 and x.stride(2) < 1 << 23 else x.contiguous()


def empty_like_heads(x_BHTE: Tensor) -> Tensor:
    """Return an uninitialised tensor of `x_BHTE`'s shape, with queries before heads in memory."""
    batch, heads, length, size = x_BHTE.shape
    # Queries come before heads in memory, because the model's next layer needs this order.
    return x_BHTE.new_empty(batch, length, heads, size).transpose(1, 2)


def launch(
    which: str, programs: int, tile: Tile, setting: Setting, tensors: dict[str, Tensor],
    *, need_theta: bool = False, parts: int = 1,
) -> None:  # fmt: skip
    """Launch a Triton kernel on the tensors' device, which need not be the current device.

    Args:
        which: The name of the Triton kernel.
        programs: The size of the first dimension of Triton's grid.
        tile: The tile sizes of the Triton kernel.
        setting: The arguments of the attention call.
        tensors: The tensors by name. For example, `q` becomes the argument `q_ptr`.
        need_theta: Whether the embedding's parameters need a gradient.
        parts: The size of the second dimension of Triton's grid.
    """
    LAUNCHES[which] += 1
    q = tensors["q"]
    if q.is_meta:  # there are no values
        return
    names, strided, _ = order(which)
    present = tuple(name for name in names if name in tensors)
    strides = [step for name in strided for step in tensors[name].stride()[:3]]
    numbers = setting.numbers(q, tensors["k"], tensors["theta"])
    dropout = setting.dropout_p > 0.0
    variant = variant_of(
        which, setting.functions, tile, q.shape[-1], present, dropout=dropout, theta=need_theta
    )
    here = not q.is_cuda or q.get_device() == torch.cuda.current_device()
    with contextlib.nullcontext() if here else torch.cuda.device(q.device):
        variant.start((programs, parts), [*map(tensors.get, names)], strides, numbers)


def cdiv(count: int, size: int) -> int:
    """Return the number of tiles of `size` elements that cover `count` elements."""
    return -(-count // size)


def forward(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor,
    rows_HW: Tensor, seed: Tensor | None, setting: Setting, terms: Terms = NO_TERMS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (output, lse, lost). The backward pass needs all three.

    - The output is [batch, heads, queries, head size] in q's dtype.
    - `lse` [batch, heads, queries] is the log-sum-exp of each softmax to base 2, in fp32.
    - `lost` is the rounding error of the output. It is empty if the backward pass does not need it.

    Args:
        q_BHTE: The queries [batch, heads, queries, head size].
        k_BKSE, v_BKSE: The keys and the values [batch, key heads, keys, head size].
        rows_HW: The embedding's parameters, one row for each head. Some embeddings are given as a
            table over query-key distances instead.
        seed: The seed of dropout. None without dropout.
        setting: The arguments that are not tensors.
        terms: Optional inputs, such as an attention sink.
    """
    q, k, v = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE))
    batch, heads, queries = q.shape[:3]
    out, keeps = empty_like_heads(q), setting.backward and q.dtype != torch.float32
    # In the output's shape and strides. Empty if the output is fp32, or without a backward pass.
    lost = empty_like_heads(q if keeps else q[:0])
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "theta": rows_HW}
    tensors["seed"] = rows_HW if seed is None else seed  # without dropout no seed is read
    tensors |= terms.tensors(setting.scale) | ({"lost": lost} if keeps else {})
    if divides_keys(q, k, setting, terms):
        decode(tensors, setting)
        return out, lse, lost
    tile = setting.tiles(q, terms).forward
    launch("forward", batch * heads * cdiv(queries, tile.M), tile, setting, tensors)
    return out, lse, lost


def divides_keys(q: Tensor, k: Tensor, setting: Setting, terms: Terms) -> bool:
    """Return whether to divide the keys into parts, because few query rows see many keys."""
    few = q.shape[1] * q.shape[2] <= FEW * k.shape[1] and k.shape[2] > MANY
    other = terms.decay_BHS is not None or setting.functions.layer is not None
    return few and not (other or setting.backward or setting.dropout_p)


def decode(tensors: dict[str, Tensor], setting: Setting) -> None:
    """Compute attention for each part of the keys, and write the merged results into `tensors`."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, queries, size = q.shape
    parts, rows = cdiv(k.shape[2], CHUNK.value), heads // k.shape[1] * queries
    tile, lse = few_rows(q.itemsize, size), tensors["lse"]
    tensors = tensors | {"lses": lse.new_empty(batch, heads * parts, queries)}
    tensors["parts"] = lse.new_empty(batch, heads * parts, queries, size)
    launch("decode", batch * k.shape[1] * cdiv(rows, tile.M), tile, setting, tensors, parts=parts)
    launch("merge", lse.numel(), tile, setting, tensors)


def backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, out_BHTE: Tensor,
    lse_BHT: Tensor, lost_BHTE: Tensor, rows_HW: Tensor, seed: Tensor | None, setting: Setting,
    need_rows: bool, terms: Terms = NO_TERMS,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, `rows_HW`, the sink and the decay.

    The gradients of q, k and v have the inputs' dtype. All others are fp32. The gradient of an
    absent input is None.

    Args:
        grad_BHTE: The gradient of the output [batch, heads, queries, head size].
        q_BHTE, k_BKSE, v_BKSE: The inputs of `forward`.
        out_BHTE, lse_BHT, lost_BHTE: The results of `forward`.
        rows_HW: The embedding's parameters or table, as in `forward`.
        seed: The seed of dropout. None without dropout.
        setting: The arguments that are not tensors.
        need_rows: Whether to compute the gradient of `rows_HW`.
        terms: Optional inputs, among them the sink and the decay.
    """
    q, k, v, grad = (rows_contiguous(x) for x in (q_BHTE, k_BKSE, v_BKSE, grad_BHTE))
    functions = setting.functions
    batch, heads, queries = q.shape[:3]
    dq = empty_like_heads(q)
    tiles, delta = setting.tiles(q, terms), torch.empty_like(lse_BHT)
    need_theta = need_rows and not functions.tabulated
    columns = functions.num_theta if need_theta else 0
    programs = batch * heads * cdiv(queries, tiles.query.M)
    sums = lse_BHT.new_empty(programs, max(1, columns))
    shared = {"q": q, "k": k, "v": v, "do": grad, "lse": lse_BHT, "delta": delta, "theta": rows_HW}
    shared["seed"] = rows_HW if seed is None else seed  # as in `forward`
    shared |= terms.tensors(setting.scale)
    tensors = shared | {"out": out_BHTE, "dq": dq, "sums": sums}
    tensors |= {"lost": lost_BHTE} if len(lost_BHTE) else {}
    launch("query", programs, tiles.query, setting, tensors, need_theta=need_rows)
    dk, dv, ddecay = key_gradients(setting, tiles.key, shared, terms)
    drows = None
    if need_theta:
        drows = sums.view(batch, heads, -1, sums.shape[1]).sum((0, 2))[:, :columns]
        if functions.layer is not None:
            drows = hidden_gradient(setting, tiles.query, shared, functions.layer, drows)
    elif need_rows:
        drows = table_gradient(setting, tiles.table, shared)
    return dq, dk, dv, drows, *terms.gradients(lse_BHT, delta, ddecay, setting.query_offset)


def key_gradients(
    setting: Setting, tile: Tile, tensors: dict[str, Tensor], terms: Terms
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the keys, the values and the decay."""
    k = tensors["k"]
    batch, key_heads, keys, size = k.shape
    programs, group = batch * key_heads * cdiv(keys, tile.N), tensors["q"].shape[1] // key_heads
    parts = parts_of(group, programs) if terms.decay_BHS is None else group
    dk, dv = written = empty_like_heads(k), empty_like_heads(k)
    if parts > 1:
        shape = 2, batch, key_heads * parts, keys, size
        written = tuple(k.new_empty(shape, dtype=torch.float32))
    of_keys = dict(zip(("dk", "dv"), written, strict=True)) | terms.of_keys(keys)
    launch("key", programs, tile, setting, tensors | of_keys, parts=parts)
    if parts > 1:
        for x, sums in zip((dk, dv), written, strict=True):
            x.copy_(sums.unflatten(1, (key_heads, parts)).sum(2))
    return dk, dv, of_keys.get("ddecay")


def parts_of(group: int, programs: int) -> int:
    """Return into how many parts to divide the `group` query heads that share a key head.

    The parts are equal. Each part has `programs` programs. All programs together should fill a GPU.
    """
    numbers = [n for n in range(1, group + 1) if group % n == 0]
    return next((n for n in numbers if n * programs >= FILL), group)


def hidden_gradient(
    setting: Setting, tile: Tile, tensors: dict[str, Tensor], layer: Layer, plain_HN: Tensor
) -> Tensor:
    """Return the gradient of `rows_HW` for an embedding with a layer of hidden units.

    `plain_HN` is the gradient of those columns of theta that do not belong to the layer.
    """
    q, rows_HW = tensors["q"], tensors["theta"]
    heads = q.shape[1]
    programs = len(q) * heads * cdiv(q.shape[2], tile.M)
    sums = tensors["lse"].new_empty(programs, 2, 1 << layer.width.bit_length())
    launch("hidden", programs, tile, setting, tensors | {"sums": sums})
    by_head = sums.view(len(q), heads, -1, *sums.shape[1:]).sum((0, 2))
    offsets_HM, slopes_HM = by_head[..., : layer.width + 1].unbind(1)
    # The columns of theta and the layer's knees, then its slopes and offsets. The knees and the
    # parameters of the layer get no gradient here.
    before = by_head.new_zeros(heads, rows_HW.shape[1] - 2 * slopes_HM.shape[1])
    for n, column in zip(layer.others, plain_HN.unbind(1), strict=True):
        before[:, n] = column
    return torch.cat((before, slopes_HM, offsets_HM), dim=1)


def table_gradient(setting: Setting, tile: Tile, tensors: dict[str, Tensor]) -> Tensor:
    """Return the gradient of a table of an embedding's bias and weight at all distances."""
    q, rows_HW = tensors["q"], tensors["theta"]
    functions = setting.functions
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
