"""Define the properties of a model that determine how published (GPT-NeoX) files store it."""

from dataclasses import dataclass

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from megatron.engine.errors import CheckpointError
from megatron.engine.neox import layout

FUSED = "attention.query_key_value."
NORM = "attention.qk_layernorm."
_SINCE_2024 = {"mlp.dense_h_to_4h.": "mlp.linear1.", "mlp.dense_4h_to_h.": "mlp.linear2."}


@dataclass(frozen=True)
class Shape:
    """The properties of a model that determine how published (GPT-NeoX) files store each weight.

    Attributes:
        num_layers: The number of transformer blocks.
        tied: Whether the output projection shares the embedding's weight.
        parts: The number of tensor-parallel ranks.
        theta: GPT-NeoX's names of the positional embedding's learned tensors; empty if there are
            none.
        geglu: Whether the MLP's activation has a gate, so that its first layer has two halves.
        summed_biases: Whether row-parallel biases are summed over the ranks (`gpt_j_residual`).
            None, if no config was found at the import: the biases then count as equal.
        row_output: Whether the output projection is row-parallel (`output_layer_parallelism: row`).
        head: Whether a version of gpt-neox from 2024 or later wrote the files. These versions name
            the MLP's layers `linear1` and `linear2`.
        group: The number of query heads that share a key head.
        head_size: The size of an attention head; 0 if unknown.
    """

    # `theta` is in the order of the columns of this project's tensor theta. If `group` is above 1,
    # the rows of a published shard of `query_key_value` are all queries, then all keys, then all
    # values.

    num_layers: NonNegativeInt
    tied: bool = False
    parts: PositiveInt = 1
    theta: tuple[str, ...] = ()
    geglu: bool = False
    summed_biases: bool | None = False
    row_output: bool = False
    head: bool = False
    group: PositiveInt = 1
    head_size: NonNegativeInt = 0

    def rule(self, name: str) -> str:
        """Return the rule by which a tensor's tensor-parallel shards are merged into one tensor.

        The rules are "rows", "columns", "halves", "replicated", "averaged" and "summed" (see
        `layout`).

        Args:
            name: GPT-NeoX's name of the tensor.
        """
        if name.startswith("mlp.dense_h_to_4h."):
            return "halves" if self.geglu else "rows"
        if name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
            return "summed" if self.summed_biases else "replicated"
        if name == "final_linear.weight":
            return "columns" if self.row_output else "rows"
        rules = layout.RULES.items()
        return next((how for start, how in rules if name.startswith(start)), "replicated")

    def ours(self, name: str, shard: Tensor) -> Tensor:
        """Return a shard of a published tensor with its rows in this project's order.

        Args:
            name: The name of the tensor.

        Raises:
            CheckpointError: The shard does not hold a whole number of heads.
        """
        if name.startswith(NORM) and shard.ndim > 1:
            if shard.shape[1] != self.head_size:
                raise CheckpointError(f"{shard.shape[1]} is not the head size, {self.head_size}")
            return shard.flatten()
        if self.group == 1 or not name.startswith(FUSED):
            return shard
        heads = self._key_heads(len(shard))
        sizes = [heads * self.group * self.head_size, *[heads * self.head_size] * 2]
        parts = [part.unflatten(0, (heads, -1)) for part in shard.split(sizes)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def published(self, name: str, shard: Tensor) -> Tensor:
        """Return a shard of this project's tensor with its rows in GPT-NeoX's order.

        Args:
            name: The name of the tensor.

        Raises:
            CheckpointError: The shard does not hold a whole number of heads.
        """
        # This method is the inverse of `ours`.
        if name.startswith(NORM) and len(shard) > 1:
            return shard.unflatten(0, (-1, self.head_size))
        if self.group == 1 or not name.startswith(FUSED):
            return shard
        grouped = shard.unflatten(0, (self._key_heads(len(shard)), -1))
        sizes = [self.group * self.head_size, self.head_size, self.head_size]
        return torch.cat([part.flatten(0, 1) for part in grouped.split(sizes, dim=1)])

    def _key_heads(self, rows: int) -> int:
        """Return the number of key heads in `rows` rows of the weight of the QKV projection."""
        width = (self.group + 2) * self.head_size
        if not width or rows % width:
            raise CheckpointError(
                f"{rows} rows hold no whole number of key heads with {self.group} queries of size "
                f"{self.head_size}; num_attention_heads is not recorded, or the ranks are too many"
            )
        return rows // width

    def file_name(self, name: str) -> str:
        """Return the name that the checkpoint files use for a tensor.

        Args:
            name: The name of the tensor in the published KERPLE code.
        """
        for old, new in _SINCE_2024.items():
            name = name.replace(old, new) if self.head else name
        return name


def published_name(name: str) -> str:
    """Return the name that the published KERPLE code uses for a tensor.

    Args:
        name: The name of the tensor in the published KERPLE code, or in gpt-neox since 2024.
    """
    for old, new in _SINCE_2024.items():
        name = name.replace(new, old)
    return name
