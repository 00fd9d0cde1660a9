"""Copy the weights of a checkpoint of any origin (`saved_checkpoints.Kind`) into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.engine.checkpoint.full_weights import Weights, fill, full_shapes
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import read as neox
from megatron.engine.neox.buffers import wrong_buffers
from megatron.engine.neox.layout import theta_names
from megatron.model import BlockShape
from megatron.model.changed_positions import ChangedPositions, of_positions
from megatron.model.theta import SHARED_THETA, THETA, columns_of, is_theta
from megatron.parallel.groups import Groups
from megatron.positional import PositionalEmbedding, within_bounds
from megatron.run_folder import RunFolder

if TYPE_CHECKING:
    from megatron.engine.local_model import Model

WORDS = "embedding.word_embeddings.weight"
_NEWER_RMSNORM = (
    "gpt-neox since May 2025 adds the epsilon of rmsnorm inside the root, as rmsnorm_fusion: true "
    "does here. Its own rmsnorm_fusion: true takes the mean of use_qk_layernorm over all heads of "
    "a rank, which is not built"
)


def load_weights(
    model: Model,
    saved: Saved,
    run: RunDescription | None = None,
    groups: Groups | None = None,
    change: ChangedPositions | None = None,
) -> list[str]:
    """Copy the weights of the checkpoint `saved` into `model`.

    Each rank copies its slices of the weights. Call this function before a DeepSpeed engine casts
    or shards the model.

    Args:
        run: The description of this run. The properties of its model are compared with those that
            the checkpoint records. None skips the comparison.
        groups: The job's process groups. They are required if the model is sharded, and every rank
            must then call this function.
        change: The old and new positional embeddings; None if they are the same.

    Returns:
        Lines to print for the user.

    Raises:
        CheckpointError: The checkpoint does not fit the model or `run`. The error message lists
            what differs, such as weights that are missing, unknown or of another shape.
    """
    # Theta (the learned parameters of the positional embedding) is clamped to its bounds. With
    # `change`, weights of embeddings that `model` does not have are ignored.
    block = model.shape.block
    described = saved.kind == "imported" and bool(saved.record.model)  # from transformers
    if run is not None and (described or saved.kind == "ours"):
        saved.require_same(run, "model", free=_free(change))
    weights, buffers, kernel, unreadable, notes = _read(saved, block)
    shapes = {name: tuple(shape) for name, shape in full_shapes(model, groups).items()}
    problems = unreadable + _merged_for_another_residual(saved, block.gpt_j_residual)
    old = change.old if change else model.pos
    problems += wrong_buffers(block, old, buffers)
    trained = (p.name.rpartition(".")[2] for p in old.trained_parameters)
    names = theta_names(old) or tuple(trained)  # those of a combination have prefixes
    if kernel and names and kernel != names:
        problems.append(
            f"{THETA}: {', '.join(kernel)} in the checkpoint, but pos_emb {old.name} has "
            f"{', '.join(names)}"
        )
    replaced: Weights = {}
    if change:
        shapes, replaced = _without_replaced(shapes, weights, change)
    problems += _differences(weights, shapes)
    if not unreadable:  # if files were unreadable, their weights are missing anyway
        missing = shapes.keys() - weights.keys()
        problems += [f"{name}: missing in the checkpoint" for name in missing]
    if problems:
        raise CheckpointError(_text_of_problems(saved, problems, weights, shapes))
    dtype = next(model.parameters()).dtype
    notes += _project_theta(old, dtype, replaced if change else weights)
    fill(model, weights)
    if change:
        notes = [*change.lines(), *notes]
        change.fill(dict(model.named_parameters()), weights | replaced)
    return notes


def _free(change: ChangedPositions | None) -> tuple[str, ...]:
    """Return the names of the model properties that may differ from the checkpoint's."""
    # They are names of entries of `RunDescription.model`.
    free = ("rope_scaling",)  # the weights fit any scaling
    if change is None:
        return free
    old, new = change.old, change.new
    free += ("pos_emb", "pos_emb_options", "theta_per_layer")
    if not (old.has("rotary") and new.has("rotary")):  # otherwise both models use these values
        free += ("rotary_pct", "rotary_base")
    if not (old.has("input") and new.has("input")):
        free += ("max_positions", "position_offset")
    return free


def _without_replaced(
    shapes: dict[str, tuple[int, ...]], weights: Weights, change: ChangedPositions
) -> tuple[dict[str, tuple[int, ...]], Weights]:
    """Remove the parameters that a change of positional embeddings replaces.

    The parameters are removed from `weights` itself, and from a copy of `shapes`.

    Returns:
        (shapes of the remaining parameters, removed weights), both by name.
    """
    # Theta (the learned parameters of the positional embedding) is removed, and so are position
    # weights that the model does not have. Theta is copied later, column by column.
    partly = {
        name
        for name in shapes.keys() | weights.keys()
        if is_theta(name) or (of_positions(name) and not (name in shapes and name in weights))
    }
    replaced = {name: weights.pop(name) for name in partly & weights.keys()}
    columns = [len(columns_of(change.old, trained=True, shared=x)) for x in (False, True)]
    for name, count in zip((THETA, SHARED_THETA), columns, strict=True):
        stored = replaced[name].shape[1] if name in replaced else 0
        if stored != count:
            raise CheckpointError(
                f"{name}: {stored} columns in the checkpoint, but its pos_emb {change.old.name} "
                f"has {count}"
            )
    return {name: shape for name, shape in shapes.items() if name not in partly}, replaced


def _read(
    saved: Saved, block: BlockShape
) -> tuple[Weights, dict[str, Tensor], tuple[str, ...], list[str], list[str]]:
    """Read the weights and the buffers (slopes or frequencies) of a checkpoint.

    Returns:
        (weights, buffers, GPT-NeoX's names of the positional embedding's learned tensors, lines
        about errors, other lines for the user).
    """
    # The names are empty if the checkpoint does not come from GPT-NeoX. The buffers have GPT-NeoX's
    # names.
    imported = saved.record.imported if saved.kind == "imported" else None
    if saved.kind != "published" and imported is None:
        return saved.weights(), saved.imported_tensors()[0], (), [], []
    if imported is not None:
        shape, weights, buffers = imported["shape"], saved.weights(), saved.imported_tensors()[0]
        problems, notes = [], []
    else:
        published = neox.read(saved.path, summed_biases=block.gpt_j_residual)
        shape, weights, buffers = published.shape, published.weights, published.buffers
        problems, notes = published.problems, [*published.notes]
        if shape.parts > 1 and block.gpt_j_residual:
            notes.append(
                f"gpt_j_residual over {shape.parts} tensor-parallel shards: that code added each "
                "shard's row-parallel biases to the sum, so their sum is taken"
            )
    if block.gpt_j_tied:  # gpt-neox stores these weights, but does not use them
        weights = {k: v for k, v in weights.items() if ".post_attention_layernorm." not in k}
    if shape.head and block.norm == "rmsnorm" and (block.qk_norm or not block.fused_norm):
        notes.append(_NEWER_RMSNORM)
    return weights, buffers, shape.theta, problems, notes


def _merged_for_another_residual(saved: Saved, gpt_j_residual: bool) -> list[str]:
    """Check whether the checkpoint was imported with this model's value of `gpt_j_residual`.

    Return a list with an error line if the import used the other value and therefore merged the
    biases wrongly. Otherwise, return [].
    """
    # With `gpt_j_residual`, the import sums the tensor-parallel shards of some biases.
    if saved.kind != "imported" or saved.record.imported is None:
        return []
    shape = saved.record.imported["shape"]
    if shape.parts == 1 or bool(shape.summed_biases) == gpt_j_residual:
        return []
    return [
        "biases of attention.dense and mlp.dense_4h_to_h: merged for gpt_j_residual: "
        f"{str(bool(shape.summed_biases)).lower()}, which is not this config's; import again, with "
        "--config and this config"
    ]


def _differences(weights: Weights, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return an error line for each stored weight that the model lacks or that differs in shape."""
    return [
        f"{name}: not in this model"
        if name not in shapes
        else f"{name}: {tuple(tensor.shape)} in the checkpoint, {shapes[name]} here"
        for name, tensor in weights.items()
        if tuple(tensor.shape) != shapes.get(name)
    ]


def _text_of_problems(
    saved: Saved, problems: list[str], weights: Weights, shapes: dict[str, tuple[int, ...]]
) -> str:
    """Return the error message for a checkpoint that does not fit the model."""
    listed = "\n  ".join(sorted(problems))
    config = str(RunFolder(saved.folder).config)
    if saved.kind == "published":
        config = f"the files in {saved.path / 'configs'}"
    padding = ""
    if WORDS in weights and WORDS in shapes and len(weights[WORDS]) != shapes[WORDS][0]:
        rows = len(weights[WORDS])
        padding = f" (vocabulary: make_vocab_size_divisible_by: {rows}, and a model_parallel_size "
        padding += f"that divides {rows})"
    return (
        f"{saved.path} does not fit the model that the config describes:\n  {listed}\n"
        f"use the config it was trained with: {config}{padding}"
    )


def _project_theta(pos: PositionalEmbedding, dtype: torch.dtype, weights: Weights) -> list[str]:
    """Clamp the positional embedding's parameters in `weights` to the bounds of the parameters.

    Return a list with a line for the user if values changed.
    """
    # The clamped values have the type `dtype`.
    # Checkpoints of the released KERPLE code may hold values beyond the bounds.
    moved = count = 0
    for name, shared in ((THETA, False), (SHARED_THETA, True)):
        if name in weights:
            columns = [p for p in pos.trained_parameters if p.shared == shared]
            theta_HN = weights[name].to(dtype)
            bounded_HN = weights[name] = within_bounds(theta_HN, columns)
            moved += int((bounded_HN != theta_HN).sum())
            count += theta_HN.numel()
    if moved == 0:
        return []
    return [f"{moved} of {count} kernel parameters lay beyond their bounds: projected"]
