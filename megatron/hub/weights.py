"""Convert our weights to the names and tensors of transformers, and back.

Most of our tensors are single tensors in transformers, too. Classes such as Llama store two of our
tensors in several parts. (Legend: K key heads, D hidden size.)

    query_key_value    [K, (q ... q | k | v), D]    q_proj, k_proj, v_proj
    dense_h_to_4h      [1, (value | gate), D]       up_proj, gate_proj

GPT-2 stores the matrices of its layers transposed, and q, k and v as one matrix [D, (q | k | v)].
A rotary embedding rotates pairs of the first R dimensions of each head. GPT-J rotates the pairs
(0, 1), (2, 3), .... Our models rotate the pairs (0, R / 2), (1, R / 2 + 1), .... Therefore the
conversion reorders the rows of queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.attention import choose
from megatron.hub.classes import HubClass
from megatron.model import GPT, GPTShape, LayerAttention, Plan
from megatron.model.theta import is_theta
from megatron.positional import PositionalEmbedding


@dataclass(frozen=True)
class Parts:
    """The tensors in transformers that correspond to one tensor of this project (its parts).

    For each head, this project's tensor contains the head's rows of part 1, then the head's rows of
    part 2, and so on.

    Attributes:
        names: The names of the parts.
        heads: The number of heads into which the rows are divided.
        rows: The number of rows of each part per head.
        columns: The sizes of all dimensions after the rows.
        transposed: Whether the stored matrices are transposed.
        turning: The number of dimensions of each head that transformers stores in another order,
            because it rotates pairs of adjacent dimensions.
    """

    names: tuple[str, ...]
    # The number of key heads, or 1.
    heads: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool = False
    turning: int = 0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each part."""
        every = self.rows if len(self.names) > 1 else (sum(self.rows),)
        for name, rows in zip(self.names, every, strict=True):
            shape = (self.heads * rows, *self.columns)
            yield name, shape[::-1] if self.transposed else shape

    def join(self, parts: list[Tensor]) -> Tensor:
        """Join the tensors of transformers into the tensor of this project, and return it."""
        parts = [part.T.contiguous() for part in parts] if self.transposed else parts
        if len(self.rows) == 1:
            return parts[0]
        if len(parts) == 1:
            parts = list(parts[0].split([self.heads * rows for rows in self.rows]))
        grouped = [part.unflatten(0, (self.heads, -1)) for part in parts]
        grouped[:2] = (_turned(part, self.turning // 2, 2) for part in grouped[:2])
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split a tensor of this project into the tensors of transformers, and return these."""
        grouped = list(tensor.unflatten(0, (self.heads, -1)).split(self.rows, dim=1))
        grouped[:2] = (_turned(part, 2, self.turning // 2) for part in grouped[:2])
        parts = [part.flatten(0, 1) for part in grouped]
        if len(self.names) == 1:
            parts = [torch.cat(parts)]
        parts = [part.T for part in parts] if self.transposed else parts
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]  # no views


def _turned(rows: Tensor, pairs: int, of: int) -> Tensor:
    """Reorder the rotated dimensions of each head, and return all rows.

    The first (pairs * of) rows of each head are read as a table [pairs, of], which is transposed.
    """
    turning = rows[:, : pairs * of].unflatten(1, (pairs, of)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turning, rows[:, pairs * of :]), dim=1) if pairs * of else rows


def layout_of(kind: HubClass | None, shape: GPTShape, pos: PositionalEmbedding) -> dict[str, Parts]:
    """Return a dict from the name of each of our weights to its tensors in transformers.

    Args:
        kind: The class of transformers. None means our own class, in which names stay the same.
        shape: The shape of the model.
        pos: The positional embedding. Its parameters are left out.
    """
    return {name: _parts(kind, shape, name, size) for name, size in _weights(shape, pos)}


def _weights(shape: GPTShape, pos: PositionalEmbedding) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each of our weights, except those of the positional embedding."""
    gated = pos.has("gate")
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32, decays=gated)
    parts = (pos.of_layer(index) for index in range(shape.num_layers))
    layers = tuple(LayerAttention(own, attend, columns) for own, columns in parts)
    with torch.device("meta"):  # names and shapes without values
        model = GPT(Plan(shape, pos, attend, seed=0, layers=layers))
    yield from ((k, tuple(v.shape)) for k, v in model.named_parameters() if not is_theta(k))


def _parts(kind: HubClass | None, shape: GPTShape, name: str, size: tuple[int, ...]) -> Parts:
    if kind is None:
        return Parts((name,), 1, size[:1], size[1:])
    module, _, leaf = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    prefix, module = (f"{kind.layers}{layer[1]}.", layer[2]) if layer else ("", module)
    theirs = kind.modules.get(module, module).split()
    names = tuple(f"{prefix}{each}.{'weight' if leaf == 'scale' else leaf}" for each in theirs)
    heads, rows, turning = 1, (size[0] // len(names),) * len(names), 0
    if len(names) == 3 or (kind.transposed and module == "attention.query_key_value"):
        block = shape.block
        heads = block.num_heads // block.group
        rows = (block.group * block.head_size, block.head_size, block.head_size)
        turning = block.rotary_ndims if "rotary_dim" in kind.defaults else 0
    transposed = kind.transposed and layer is not None and len(size) == 2
    return Parts(names, heads, rows, size[1:], transposed, turning)
