"""A checkpoint's weights into a model: one of our own, an imported one, or a published folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.engine.checkpoint.full_weights import fill, whole_shapes
from megatron.engine.checkpoint.saved import (
    imported_rest,
    is_foreign,
    read_record,
    read_weights,
    require_same,
)
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import layout
from megatron.engine.neox import read as neox_checkpoint
from megatron.model import BlockShape
from megatron.parallel import Groups
from megatron.positional import PositionalEmbedding
from megatron.positional.rotary import frequencies

if TYPE_CHECKING:
    from megatron.engine.training.pipeline import Model

THETA = "embedding.theta"


def load_weights(
    model: Model,
    folder: Path,
    tag: str,
    identity: dict[str, Any] | None = None,
    groups: Groups | None = None,
) -> list[str]:
    """Copy the checkpoint `folder/tag` into `model`, which must have the same parameters.

    The model may be one rank's slice or stage: it takes its parts of the whole weights.

    Call it before an engine casts or shards the model: masters then start from the stored values.
    Theta beyond its bounds, as the published code leaves it, is projected, in the model's dtype.

    Args:
        identity: what makes weights interchangeable (`build.identity_of`). A checkpoint of our own
            must have the same; what was published records none.
        groups: of a job whose model is shared out; every rank must call this.

    Returns:
        What the user should know, a line each.

    Raises:
        CheckpointError: lists everything that is missing, unknown or of another shape.
    """
    checkpoint = folder / tag
    notes, wrong = [], []
    if neox_checkpoint.is_published(checkpoint):
        block = model.shape.block
        published = neox_checkpoint.read(checkpoint, summed_biases=block.gpt_j_residual)
        stored, wrong, notes = published.weights, published.problems, published.notes
        buffers = published.buffers
        notes += _about_biases(published.shape, block.gpt_j_residual)
        config = f"the files in {checkpoint / 'configs'}"
    else:
        if identity is not None and not is_foreign(folder, tag):
            require_same(folder, tag, {"model": identity})
        stored, (buffers, _) = read_weights(folder, tag), imported_rest(folder, tag)
        config = str(folder / "config.yml")
    own = whole_shapes(model, groups)
    if not wrong:  # else what is missing follows from what could not be read
        wrong = [f"{name}: missing in the checkpoint" for name in own.keys() - stored.keys()]
    wrong += _merged_otherwise(folder, tag, model.shape.block.gpt_j_residual)
    wrong += wrong_buffers(model, buffers)
    wrong += [f"{name}: not in this model" for name in stored.keys() - own.keys()]
    shapes = {
        name: (tuple(stored[name].shape), tuple(own[name])) for name in own.keys() & stored.keys()
    }
    wrong += [
        f"{name}: {theirs} in the checkpoint, {ours} here"
        for name, (theirs, ours) in shapes.items()
        if theirs != ours
    ]
    if wrong:
        listed = "\n  ".join(sorted(wrong))
        theirs, ours = shapes.get("embedding.word_embeddings.weight", ((0,), (0,)))
        padding = f" (vocabulary: make_vocab_size_divisible_by: {theirs[0]})"
        raise CheckpointError(
            f"{checkpoint} does not fit the model that the config describes:\n  {listed}\n"
            f"use the config it was trained with: {config}{padding if theirs[0] != ours[0] else ''}"
        )
    if THETA in stored:  # whole, so that all ranks say the same, those without theta too
        dtype = next(model.parameters()).dtype
        theta_HN = stored[THETA].to(dtype)
        bounded_HN = stored[THETA] = model.pos.within_bounds(theta_HN)
        if moved := int((bounded_HN != theta_HN).sum()):
            count = theta_HN.numel()
            notes.append(f"{moved} of {count} kernel parameters lay beyond their bounds: projected")
    fill(model, stored)
    return notes


def implied_buffers(
    block: BlockShape, pos: PositionalEmbedding, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What published files hold although it follows from the configuration, rounded to `dtype`."""
    sinusoidal, rotary, alibi = layout.BUFFERS
    if pos.name == "sinusoidal":
        return {sinusoidal: frequencies(block.hidden_size, 10000.0, dtype, None)}
    if pos.name == "rotary":
        turned = int(block.head_size * block.rotary_pct)
        return {rotary: frequencies(turned, block.rotary_base, dtype, None)}
    if pos.kind != "distance" or pos.learnable:
        return {}
    slopes = pos.initial_theta(block.num_heads).to(dtype)
    return {alibi: slopes.flatten()} if pos.name == "alibi" else {layout.FIXED: slopes[..., None]}


def wrong_buffers(model: Model, stored: dict[str, torch.Tensor]) -> list[str]:
    """Stored slopes and frequencies that this model would not compute; none need be stored."""
    wrong = []
    for name, tensor in stored.items():
        own = implied_buffers(model.shape.block, model.pos, tensor.dtype).get(name)
        if name == layout.FIXED:
            tensor = tensor.clamp(min=0.01)  # the published code clamps them when it first runs
        near = own is not None and own.shape == tensor.shape
        if not near or not torch.allclose(own.float(), tensor.float(), rtol=1e-2, atol=0.0):
            wrong.append(f"{name}: other values than pos_emb {model.pos.name} has here")
    return wrong


def _merged_otherwise(folder: Path, tag: str, gpt_j_residual: bool) -> list[str]:
    """Tensor-parallel parts are merged for one `gpt_j_residual`, at import; see `Shape`."""
    if neox_checkpoint.is_published(folder / tag):
        return []
    shape = read_record(folder, tag).get("imported", {}).get("shape", {})
    if shape.get("parts", 1) == 1 or shape["summed_biases"] == gpt_j_residual:
        return []
    said = str(shape["summed_biases"]).lower()
    return [
        f"biases of attention.dense and mlp.dense_4h_to_h: merged for gpt_j_residual: {said}, "
        "which is not this config's; import again, with --config and this config"
    ]


def _about_biases(shape: neox_checkpoint.Shape, gpt_j_residual: bool) -> list[str]:
    if shape.parts == 1 or not gpt_j_residual:
        return []
    return [
        f"gpt_j_residual over {shape.parts} tensor-parallel parts: that code added each part's "
        "row-parallel biases to the sum, so the sum is what is taken"
    ]
