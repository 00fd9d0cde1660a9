"""Define the published (GPT-NeoX) checkpoint layout: its files and the shards of its tensors.

GPT-NeoX divides a model into L + 5 pipeline positions XX. For each position that has tensors, each
tensor-parallel rank YY writes one file, `layer_XX-model_YY-model_states.pt`:

    XX = 0            embedding           word_embeddings, position_embeddings
    XX = 2 ... L+1    blocks              norms, attention, mlp; the distance kernel's parameters
    XX = L+3          final norm          norm
    XX = L+4          output projection   final_linear; no file if tied to the embedding

Positions 1 and L+2 only transpose activations. Linear weights are [out, in]. A distance kernel is a
bias or factor that depends only on the query-key distance. A tensor's N tensor-parallel shards are
merged by one of these rules:

    rows        concatenated on dimension 0: embedding, column-parallel layers, per-head tensors
    columns     concatenated on dimension 1: weights of row-parallel layers, T5's bias table
    halves      geglu's first layer: a shard is [value | gate], the whole is [values | gates]
    replicated  the same in every shard
    averaged    norms: nearly the same in every shard, because each rank trains its own
    summed      added up: row-parallel biases with `gpt_j_residual` (every rank adds its own bias)

Versions of gpt-neox since 2024 use other names for some tensors, and store additional tensors (see
`neox/shape.py`).

Legend: L layers, N tensor-parallel ranks, H heads. (In `theta_HN`, N counts parameters per head.)
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.engine.errors import CheckpointError
from megatron.positional import PositionalEmbedding

NOT_CONCATENATED = ("replicated", "averaged", "summed")
FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
THETA = ("bias_p", "bias_a", "wei_p", "wei_a")  # [H / N, 1, 1] each, in our columns' order
TABLE = "weight"  # T5's, [buckets, H / N]
EMBEDDINGS = frozenset(
    ("kerple_log", "kerple_power", "kerple_power_mul", "kerple_power_add_mul")
    + ("kerple_power_original", "alibi", "rpe", "rotary", "sinusoidal", "learned", "none")
)
"""The embeddings that the published code has, by their names in this project."""
RPE = "attention.rpe."
FIXED = "attention.rpe.bias_a"  # alone in a block: `kerple_power_original`'s untrained slopes
BUFFERS = (
    "position_embeddings.inv_freq",
    "attention.rotary_emb.inv_freq",
    "attention.alibi_embed.slopes",
)
"""The names of stored tensors whose values follow from the configuration (`neox/buffers.py`)."""

RULES = {
    "input_layernorm.": "averaged",
    "post_attention_layernorm.": "averaged",
    "norm.": "averaged",
    "word_embeddings.": "rows",
    "attention.query_key_value.": "rows",
    "attention.qk_layernorm.g": "replicated",
    "attention.qk_layernorm.": "rows",
    "attention.alibi_embed.slopes": "rows",
    RPE + TABLE: "columns",
    RPE: "rows",
    "attention.dense.weight": "columns",
    "mlp.dense_4h_to_h.weight": "columns",
}
"""The rules that do not depend on the model, by the start of the tensor's name (see `Shape`)."""


def file_name(index: int, rank: int) -> str:
    """Return `layer_XX-model_YY-model_states.pt`, where XX is `index` and YY is `rank`."""
    return f"layer_{index:02d}-model_{rank:02d}-model_states.pt"


def positions(num_layers: int, tied: bool) -> list[int]:
    """Return the positions in GPT-NeoX's pipeline whose tensors are stored in checkpoint files.

    Args:
        num_layers: The number of transformer blocks.
        tied: Whether the output projection shares the embedding's weight.
    """
    return [0, *range(2, num_layers + 2), num_layers + 3, *([] if tied else [num_layers + 4])]


def merge(shards: Sequence[Tensor], how: str) -> Tensor:
    """Merge the shards of all tensor-parallel ranks into one tensor.

    Args:
        shards: The shards, by rank.
        how: The rule for merging, such as "rows".

    Raises:
        ValueError: The shards' shapes do not fit, or shards that must be equal differ.
    """
    # With the rule "summed", the result is fp64 if the shards' dtype cannot hold the exact sum.
    # gpt-neox's own converters average norms, too.
    first = shards[0]
    if len(shards) == 1:
        return first
    if how == "rows":
        return torch.cat(list(shards), dim=0)
    if how == "columns":
        return torch.cat(list(shards), dim=1)
    if how == "halves":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([value for value, _ in halves] + [gate for _, gate in halves], dim=0)
    if any(shard.shape != first.shape for shard in shards):
        shapes = ", ".join(str(tuple(shard.shape)) for shard in shards)
        raise ValueError(f"its shards should have one shape, not {shapes}")
    all_shards = torch.stack([shard.double() for shard in shards])
    if how == "summed":
        exact = all_shards.sum(dim=0)
        narrow = exact.to(first.dtype)
        return narrow if torch.equal(narrow.double(), exact) else exact
    gap = (all_shards - all_shards[0]).abs().max().item()
    if gap > (0.05 if how == "averaged" else 1e-3) * max(1.0, first.abs().max().item()):
        raise ValueError(f"its {len(shards)} shards should be equal, but differ by up to {gap:.3g}")
    return all_shards.mean(dim=0).to(first.dtype) if gap else first


def split(tensor: Tensor, how: str, count: int, *, name: str = "tensor") -> list[Tensor]:
    """Split a tensor into `count` tensor-parallel shards. This function is the inverse of `merge`.

    Args:
        how: The rule by which the shards can be merged again, such as "rows".
        name: The tensor's name in error messages.

    Raises:
        CheckpointError: The tensor cannot be divided equally among `count` ranks.
    """
    # With the rule "halves", the split dimension must be a multiple of 2 * `count`.
    if count == 1:
        return [tensor]
    if how in ("replicated", "averaged"):
        return [tensor] * count
    if how == "summed":
        return [tensor / count] * count
    dim = 1 if how == "columns" else 0
    pieces = 2 * count if how == "halves" else count
    if tensor.shape[dim] % pieces:
        raise CheckpointError(
            f"{name}: {tuple(tensor.shape)} cannot be cut into {pieces} along dimension {dim}; "
            "export to fewer ranks"
        )
    chunks = [chunk.clone() for chunk in tensor.chunk(pieces, dim=dim)]
    if how == "halves":
        return [torch.cat((chunks[i], chunks[count + i])) for i in range(count)]
    return chunks


def our_name(index: int, name: str, num_layers: int) -> str | None:
    """Return this project's name for a tensor of GPT-NeoX, or None if there is no such name.

    Args:
        index: The tensor's position in GPT-NeoX's pipeline.
        name: GPT-NeoX's name of the tensor.
        num_layers: The number of transformer blocks.
    """
    # The result is also None for the learned tensors of a distance kernel (see `theta_columns`).
    if index == 0:
        known = name in ("word_embeddings.weight", "position_embeddings.weight")
        return f"embedding.{name}" if known else None
    if index == num_layers + 3:
        return f"final_norm.{name.removeprefix('norm.')}" if name.startswith("norm.") else None
    if index == num_layers + 4:
        return "output.weight" if name == "final_linear.weight" else None
    return None if name.startswith(RPE) else f"layers.{index - 2}.{name}"


def published_place(name: str, num_layers: int) -> tuple[int, str]:
    """Return GPT-NeoX's pipeline position and name of the tensor that this project calls `name`."""
    # This function is the inverse of `our_name`.
    head, _, rest = name.partition(".")
    if head == "embedding":
        return 0, rest
    if head == "final_norm":
        return num_layers + 3, f"norm.{rest}"
    if head == "output":
        return num_layers + 4, f"final_linear.{rest}"
    layer, _, rest = rest.partition(".")
    return int(layer) + 2, rest


def theta_names(pos: PositionalEmbedding) -> tuple[str, ...]:
    """Return GPT-NeoX's names of the positional embedding's learned tensors.

    The result is empty if `pos` is not a distance kernel with learned parameters.
    """
    # The names are in the order of the columns of theta [heads, parameters per head], which is this
    # project's tensor of all learned parameters.
    if pos.kind != "distance" or not pos.learnable:
        return ()
    return (TABLE,) if pos.name == "rpe" else tuple(p.name for p in pos.parameters)


def theta_columns(theta_HN: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Split the positional embedding's learned parameters into the tensors that GPT-NeoX stores.

    Args:
        theta_HN: The learned parameters or their gradient, [heads, parameters per head].
        names: GPT-NeoX's name of each column of `theta_HN`; ("weight",) for T5's bias table.

    Returns:
        A dict from "attention.rpe.NAME" to tensor, for each NAME in `names`.
    """
    # Each column becomes a tensor of its own. T5's bias table stays one tensor, "weight".
    if list(names) == [TABLE]:
        return {RPE + TABLE: theta_HN.T.contiguous()}
    if len(names) != theta_HN.shape[1]:
        text = f"theta has {theta_HN.shape[1]} columns, but {len(names)} are named"
        raise CheckpointError(f"{text}: {', '.join(names) or 'none'}")
    columns = zip(names, theta_HN.unbind(1), strict=True)
    return {RPE + name: column.reshape(-1, 1, 1).contiguous() for name, column in columns}


def theta_from_columns(columns: dict[str, Tensor]) -> tuple[Tensor, list[str]]:
    """Return the positional embedding's parameters [heads, parameters per head], and the names.

    The names are GPT-NeoX's names of the parameters of a head. This function is the inverse of
    `theta_columns`.

    Args:
        columns: The tensors of the positional embedding in one transformer block, by GPT-NeoX's
            names. Each tensor contains all heads.
    """
    if RPE + TABLE in columns:
        return columns[RPE + TABLE].T.contiguous(), [TABLE]
    names = [name for name in THETA if RPE + name in columns]
    return torch.stack([columns[RPE + name].flatten() for name in names], dim=1), names
