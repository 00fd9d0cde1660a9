"""Copy the weights of a checkpoint of any origin (`saved_checkpoints.Kind`) into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.engine.checkpoint.full_weights import Weights, fill, full_shapes
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Kind, Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import read as neox
from megatron.engine.neox.buffers import wrong_buffers
from megatron.engine.neox.layout import theta_names
from megatron.model.theta import SHARED_THETA, THETA
from megatron.parallel.groups import Groups
from megatron.positional import within_bounds
from megatron.run_folder import RunFolder

if TYPE_CHECKING:
    from megatron.engine.local_model import Model

WORDS = "embedding.word_embeddings.weight"


def load_weights(
    model: Model, saved: Saved, run: RunDescription | None = None, groups: Groups | None = None
) -> list[str]:
    """Copy the weights of the checkpoint `saved` into `model`.

    If `model` is one rank's shard, only this rank's slices of the weights are copied. Theta (the
    learned parameters of the positional embedding) is clamped to its bounds. Call this function
    before an engine casts or shards the model.

    Args:
        run: The description of this run. An error is raised if the checkpoint records another model
            than `run.model`. None skips this comparison.
        groups: The job's process groups. They are required if the model is sharded, and every rank
            must then call this function.

    Returns:
        Lines to print for the user.

    Raises:
        CheckpointError: The checkpoint does not fit the model or `run`. The error message lists
            what differs, such as weights that are missing, unknown or of another shape.
    """
    block = model.shape.block
    described = saved.kind is Kind.IMPORTED and bool(saved.record.model)  # from transformers
    if run is not None and (described or saved.kind is Kind.OURS):
        saved.require_same(run, "model", free=("rope_scaling",))  # the weights fit any scaling
    weights, buffers, kernel, unreadable, notes = _read(saved, block.gpt_j_residual)
    shapes = {name: tuple(shape) for name, shape in full_shapes(model, groups).items()}
    problems = unreadable + _merged_for_another_residual(saved, block.gpt_j_residual)
    problems += wrong_buffers(block, model.pos, buffers)
    trained = (p.name.rpartition(".")[2] for p in model.pos.trained_parameters)
    names = theta_names(model.pos) or tuple(trained)  # those of a combination have prefixes
    if kernel and names and kernel != names:
        problems.append(
            f"{THETA}: {', '.join(kernel)} in the checkpoint, but pos_emb {model.pos.name} has "
            f"{', '.join(names)}"
        )
    problems += _differences(weights, shapes)
    if not unreadable:  # if files were unreadable, their weights are missing anyway
        missing = shapes.keys() - weights.keys()
        problems += [f"{name}: missing in the checkpoint" for name in missing]
    if problems:
        raise CheckpointError(_text_of_problems(saved, problems, weights, shapes))
    notes += _project_theta(model, weights)
    fill(model, weights)
    return notes


def _read(
    saved: Saved, gpt_j_residual: bool
) -> tuple[Weights, dict[str, Tensor], tuple[str, ...], list[str], list[str]]:
    """Return (weights, buffers, names, problems, notes) of the checkpoint `saved`.

    `names` are GPT-NeoX's names of the positional embedding's learned tensors. The tuple is empty
    if the checkpoint does not come from GPT-NeoX. `buffers` are stored slopes or frequencies, by
    GPT-NeoX's names. `problems` and `notes` are lines for the user.
    """
    if saved.kind is not Kind.PUBLISHED:
        buffers, _ = saved.imported_tensors()
        imported = saved.record.imported
        names = imported["shape"].theta if imported else ()
        return saved.weights(), buffers, names, [], []
    published = neox.read(saved.path, summed_biases=gpt_j_residual)
    notes = list(published.notes)
    if published.shape.parts > 1 and gpt_j_residual:
        notes.append(
            f"gpt_j_residual over {published.shape.parts} tensor-parallel shards: that code added "
            "each shard's row-parallel biases to the sum, so their sum is taken"
        )
    names = published.shape.theta
    return published.weights, published.buffers, names, published.problems, notes


def _merged_for_another_residual(saved: Saved, gpt_j_residual: bool) -> list[str]:
    """Return an error line if the import of `saved` used another value of `gpt_j_residual`.

    Otherwise return an empty list.
    """
    # With `gpt_j_residual`, the import sums the tensor-parallel shards of some biases.
    if saved.kind is not Kind.IMPORTED or saved.record.imported is None:
        return []
    shape = saved.record.imported["shape"]
    if shape.parts == 1 or shape.summed_biases == gpt_j_residual:
        return []
    return [
        "biases of attention.dense and mlp.dense_4h_to_h: merged for gpt_j_residual: "
        f"{str(shape.summed_biases).lower()}, which is not this config's; import again, with "
        "--config and this config"
    ]


def _differences(weights: Weights, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return one line for each stored weight that the model lacks, or has in another shape."""
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
    published = saved.kind is Kind.PUBLISHED
    config = (
        f"the files in {saved.path / 'configs'}" if published else RunFolder(saved.folder).config
    )
    padding = ""
    if WORDS in weights and WORDS in shapes and len(weights[WORDS]) != shapes[WORDS][0]:
        padding = f" (vocabulary: make_vocab_size_divisible_by: {len(weights[WORDS])})"
    return (
        f"{saved.path} does not fit the model that the config describes:\n  {listed}\n"
        f"use the config it was trained with: {config}{padding}"
    )


def _project_theta(model: Model, weights: Weights) -> list[str]:
    """Clamp theta in `weights` to its bounds; return a line for the user if values changed.

    Theta contains the learned parameters of the positional embedding.
    """
    # Checkpoints of the released KERPLE code may hold values beyond the bounds.
    moved = count = 0
    for name, shared in ((THETA, False), (SHARED_THETA, True)):
        if name in weights:
            columns = [p for p in model.pos.trained_parameters if p.shared == shared]
            theta_HN = weights[name].to(next(model.parameters()).dtype)
            bounded_HN = weights[name] = within_bounds(theta_HN, columns)
            moved += int((bounded_HN != theta_HN).sum())
            count += theta_HN.numel()
    if moved == 0:
        return []
    return [f"{moved} of {count} kernel parameters lay beyond their bounds: projected"]
