"""Between the published layout and ours, on disk: import a checkpoint, export one of ours.

An imported checkpoint is a folder in our layout that holds the weights as stored and, in
`kerple.json` under `imported`, what `export_checkpoint` needs to give the same files back: tensor
for tensor, with the same names, shapes, dtypes and file names. Neither direction carries an
optimizer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config, load_config
from megatron.engine.build import DTYPES, positional_of, shape_of
from megatron.engine.checkpoint import saved as checkpoint
from megatron.engine.checkpoint.files import appears_whole
from megatron.engine.checkpoint.load_weights import implied_buffers
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import layout
from megatron.engine.neox import read as neox_checkpoint
from megatron.engine.neox.read import Published, Shape
from megatron.positional import PositionalEmbedding
from megatron.version import __version__


def import_checkpoint(source: Path, target: Path, *, summed_biases: bool) -> Published:
    """Write the published folder `global_stepN` into the run folder `target`, in our layout.

    Args:
        summed_biases: it was trained with `gpt_j_residual` (matters with tensor parallelism only).

    Raises:
        CheckpointError: everything that is missing, unknown or does not fit together; or `target`
            has a checkpoint of that step already (it may be `source` itself).
    """
    found = neox_checkpoint.read(source, summed_biases=summed_biases)
    if found.problems:
        listed = "\n  ".join(found.problems)
        raise CheckpointError(f"{source} is not whole:\n  {listed}")
    tag = checkpoint.tag_of(found.step)
    _refuse_existing(target / tag)
    record = {
        "version": __version__,
        "progress": {"step": found.step, "consumed_samples": 0, "train_samples": 0},
        "layout": {"zero_stage": 0},
        "imported": found.about(),
    }
    with appears_whole(target, tag) as folder:
        state = {"module": found.weights, "neox_buffers": found.buffers, "neox_parts": found.parts}
        torch.save(state, folder / "mp_rank_00_model_states.pt")
        if (source / "configs").is_dir():
            shutil.copytree(source / "configs", folder / "configs")
        (folder / "kerple.json").write_text(json.dumps(record, indent=1))
    return found


def export_checkpoint(source: Path, target: Path, *, parts: int | None = None) -> Path:
    """Write the newest checkpoint of the run folder `source` in the published layout.

    Args:
        parts: tensor-parallel parts, at least 1; None for as many as it was trained with.

    Returns:
        The new folder, `target/global_stepN`.

    Raises:
        CheckpointError: there is none, `target` has that folder already, or the published code has
            no such model.
    """
    tag = checkpoint.newest(source)
    if tag is None:
        raise CheckpointError(f"{source} holds no checkpoint (no file `latest`)")
    record = checkpoint.read_record(source, tag)
    weights = checkpoint.read_weights(source, tag)
    if "imported" in record:
        about = record["imported"]
        shape = Shape(**about["shape"] | {"theta": tuple(about["shape"]["theta"])})
        buffers, kept = checkpoint.imported_rest(source, tag)
    else:
        config = _config_of(record)
        dtype = DTYPES[config.training.precision]
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        pos = positional_of(config)
        block = shape_of(config, len(weights["embedding.word_embeddings.weight"])).block
        shape, buffers, kept = _shape_of(config, pos), implied_buffers(block, pos, dtype), {}
        about = {"schedule": None, "args": _args_of(config, weights)}
    args, written = about["args"], shape.parts
    shape = replace(shape, parts=parts or written)
    args |= {"model_parallel_size": shape.parts}
    if shape.parts != written or (shape.parts > 1 and "imported" not in record):
        # That program pads to a multiple of this times the parts, and compares both.
        padded = len(weights["embedding.word_embeddings.weight"])
        args["make_vocab_size_divisible_by"] = padded // shape.parts
    state = {"lr_scheduler": about["schedule"], "args": args}
    target.mkdir(parents=True, exist_ok=True)
    _refuse_existing(target / tag)
    with appears_whole(target, tag) as folder:
        _write(folder, shape, weights, buffers, kept, record["progress"]["step"], state)
        if (source / tag / "configs").is_dir():
            shutil.copytree(source / tag / "configs", folder / "configs")
    return target / tag


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; remove it, or name another folder")


def _write(
    folder: Path,
    shape: Shape,
    weights: dict[str, Tensor],
    buffers: dict[str, Tensor],
    kept: dict[str, list[Tensor]],
    step: int,
    state: dict[str, Any],
) -> None:
    """The files of a published folder. There is no optimizer in them: `no_load_optim: true`."""
    blocks = range(2, shape.num_layers + 2)
    shared = dict(buffers)
    placed: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        if name == "embedding.theta":
            shared |= layout.theta_columns(tensor, shape.theta)
        else:
            index, published = layout.published_place(name, shape.num_layers)
            placed[index][published] = tensor
    for name, tensor in shared.items():
        for index in [0] if name.startswith("position_embeddings.") else blocks:
            placed[index][name] = tensor
    dtype = weights["embedding.word_embeddings.weight"].dtype
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for index, tensors in placed.items():
        for name, tensor in tensors.items():
            pieces = kept.get(f"{index}.{name}", [])
            if len(pieces) != shape.parts:
                if tensor.dtype == torch.float64:  # a sum that `dtype` does not hold
                    tensor = tensor.to(dtype)
                try:
                    pieces = layout.cut(tensor, shape.rule(name), shape.parts)
                except ValueError as error:
                    raise CheckpointError(f"{name}: {error}; export to fewer parts") from error
            for part, piece in enumerate(pieces):
                files[layout.file_name(index, part)][name] = piece.clone()
    for name, tensors in files.items():
        torch.save(tensors, folder / name)
    counters = {"iteration": step, "global_steps": step, "global_samples": 0, "skipped_steps": 0}
    sizes = {"dp_world_size": 1, "mp_world_size": shape.parts}
    absent = {"module": None, "optimizer": None, "csr_tensor_module_names": set()}
    for part in range(shape.parts):
        path = folder / f"mp_rank_{part:02d}_model_states.pt"
        torch.save(absent | counters | sizes | state, path)


def _config_of(record: dict[str, Any]) -> Config:
    """The configuration that one of our own checkpoints was written under."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(record["config"], file)
        file.flush()
        return load_config([file.name], world_size=record["layout"]["data_parallel_size"])


def _shape_of(config: Config, pos: PositionalEmbedding) -> Shape:
    m = config.model
    theta: tuple[str, ...] = ()
    if pos.kind == "distance" and pos.learnable:
        names = tuple(p.name for p in pos.parameters)
        theta = (layout.TABLE,) if pos.name == "rpe" else names
    unknown = set(theta) - {*layout.THETA, layout.TABLE}
    if unknown:
        raise CheckpointError(
            f"the published code has no pos_emb {pos.name} (it knows no {', '.join(unknown)}), so "
            "this checkpoint cannot be exported to it"
        )
    return Shape(
        num_layers=m.num_layers,
        tied=not m.no_weight_tying,
        theta=theta,
        geglu=m.activation == "geglu",
        parts=config.parallel.model_parallel_size,
        summed_biases=m.gpt_j_residual,
        row_output=m.output_layer_parallelism == "row",
    )


def _args_of(config: Config, weights: dict[str, Tensor]) -> dict[str, Any]:
    """What the published program compares with its own configuration when it loads."""
    m = config.model
    return {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "max_position_embeddings": m.max_position_embeddings,
        "make_vocab_size_divisible_by": m.make_vocab_size_divisible_by,
        "padded_vocab_size": len(weights["embedding.word_embeddings.weight"]),
        "tokenizer_type": config.data.tokenizer_type,
    }
