"""Import published (GPT-NeoX) checkpoints into this project's layout, and export them again.

An import does not change the values of the weights. The import writes an entry `imported` into
`kerple.json`. A later export uses this entry to restore the original files: all tensors have the
same names, shapes, dtypes and values as before the import. No optimizer state is imported or
exported.
"""

import json
import math
import shutil
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config, load_config
from megatron.config.mlp_width import GATED
from megatron.engine.build import positional_of
from megatron.engine.checkpoint.publish import new_checkpoint, write_import
from megatron.engine.checkpoint.record import Record
from megatron.engine.checkpoint.saved_checkpoints import require_newest
from megatron.engine.errors import CheckpointError
from megatron.engine.model_shape import DTYPES, shape_of
from megatron.engine.neox import layout
from megatron.engine.neox.buffers import implied_buffers
from megatron.engine.neox.read import Published, read
from megatron.engine.neox.shape import Shape
from megatron.model import BlockShape
from megatron.model.theta import THETA
from megatron.positional import PositionalEmbedding

WORDS = "embedding.word_embeddings.weight"


def import_checkpoint(source: Path, target: Path, *, summed_biases: bool | None) -> Published:
    """Convert a published (GPT-NeoX) checkpoint to this project's layout, and save it in `target`.

    Args:
        source: The published checkpoint's folder, `global_stepN`.
        target: The run folder, in which the new checkpoint becomes a subfolder `global_stepN`.
        summed_biases: Whether the model was trained with GPT-NeoX's `gpt_j_residual`. In such a
            model, the bias of a row-parallel layer differs from rank to rank. The import stores the
            sum of the ranks' biases. None means that this is not known.

    Raises:
        CheckpointError: `target` already has a checkpoint of this step, or `source` is not
            complete. The error message lists every problem of `source`.
    """
    found = read(source, summed_biases=summed_biases)
    if found.problems:
        raise CheckpointError("\n  ".join([f"{source} is not complete:", *found.problems]))
    state = {"module": found.weights, "neox_buffers": found.buffers, "neox_parts": found.shards}
    configs = source / "configs" if (source / "configs").is_dir() else None
    about = {"shape": asdict(found.shape), "schedule": found.schedule, "args": found.args}
    write_import(target, found.step, state, {"imported": about}, configs)
    return found


def export_checkpoint(source: Path, target: Path, *, parts: int | None = None) -> Path:
    """Convert the newest checkpoint of the run folder `source` to GPT-NeoX's published layout.

    Args:
        parts: The number of tensor-parallel ranks of the new checkpoint; None means the number with
            which `source` was trained.

    Returns:
        The new folder, `target/global_stepN`.

    Raises:
        CheckpointError: `source` has no checkpoint, `target` already has the new folder, or no
            version of GPT-NeoX supports the model.
    """
    saved = require_newest(source)
    weights, (buffers, shards) = saved.weights(), saved.imported_tensors()
    about: dict[str, Any] = {**(saved.record.imported or {})}
    if about:
        shape: Shape = about["shape"]
    else:
        config = _config_of(saved.record)
        dtype = DTYPES[config.training.precision]
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        pos = positional_of(config)
        first, _ = pos.of_layer(0)
        pos = first if first.name == pos.name else pos  # all layers have the same
        block = shape_of(config, len(weights[WORDS])).block
        shape, buffers = _shape_of(config, block, pos), implied_buffers(block, pos, dtype)
        if shape.head and pos.name == "rotary":
            buffers = {}  # gpt-neox does not store frequencies any more
        about = {"schedule": None, "args": _args_of(config, weights)}
    args, written = about["args"], shape.parts
    shape = replace(shape, parts=parts or written)
    biases = any(name.endswith(("attention.dense.bias", "4h_to_h.bias")) for name in weights)
    if biases and shape.summed_biases is None and shape.parts != written:
        raise CheckpointError(
            "no config was found when this checkpoint was imported, so it is not known how biases "
            "are split (gpt_j_residual); import it again with --config, or export without --tp"
        )
    args |= {"model_parallel_size": shape.parts}
    if shape.parts != written or (shape.parts > 1 and saved.kind != "imported"):
        # The published code pads the vocabulary to a multiple of this value times the number of
        # shards. On loading, it compares this value and the padded size with its own.
        args["make_vocab_size_divisible_by"] = len(weights[WORDS]) // shape.parts
    with new_checkpoint(target, saved.tag) as folder:
        _write_layers(folder, shape, _placed(shape, weights, buffers), shards)
        state = {"lr_scheduler": about["schedule"], "args": args, "kerple_run": saved.lineage}
        _write_counters(folder, shape, saved.step, state)
        if (saved.path / "configs").is_dir():
            shutil.copytree(saved.path / "configs", folder / "configs")
    return target / saved.tag


def _placed(
    shape: Shape, weights: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[tuple[int, str], Tensor]:
    """Return a dict from (GPT-NeoX's pipeline position, GPT-NeoX's name) to unsharded tensor."""
    # As in GPT-NeoX, every transformer block has its own entries for the positional embedding.
    placed = {}
    in_all_blocks = dict(buffers)
    for name, tensor in weights.items():
        if name == THETA:
            in_all_blocks |= layout.theta_columns(tensor, shape.theta)
        else:
            placed[layout.published_place(name, shape.num_layers)] = tensor
    for name, tensor in in_all_blocks.items():
        blocks = range(2, shape.num_layers + 2)
        for index in [0] if name.startswith("position_embeddings.") else blocks:
            placed[index, name] = tensor
    return placed


def _write_layers(
    folder: Path,
    shape: Shape,
    placed: dict[tuple[int, str], Tensor],
    imported_shards: dict[str, list[Tensor]],
) -> None:
    """Write the model's weights to GPT-NeoX's layer files in `folder`."""
    # The files are `layer_XX-model_YY-model_states.pt`: XX is the position in GPT-NeoX's pipeline,
    # and YY the tensor-parallel rank. `placed` maps (position, GPT-NeoX's name) to the unsharded
    # tensor. `imported_shards` maps "position.name" to the shards of an imported tensor, which are
    # written as they are if there are `shape.parts` of them.
    dtype = placed[0, "word_embeddings.weight"].dtype
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for (index, name), tensor in placed.items():
        shards = imported_shards.get(f"{index}.{name}", [])
        if len(shards) != shape.parts:
            if tensor.dtype == torch.float64:  # a sum that `dtype` cannot represent
                tensor = tensor.to(dtype)
            shards = layout.split(tensor, shape.rule(name), shape.parts, name=name)
        for rank, shard in enumerate(shards):
            stored = files[layout.file_name(index, rank)]
            stored[shape.file_name(name)] = shape.published(name, shard).clone()
    for name, tensors in files.items():
        torch.save(tensors, folder / name)


def _write_counters(folder: Path, shape: Shape, step: int, state: dict[str, Any]) -> None:
    """Write the step and the other counters of the run to GPT-NeoX's state files."""
    # The files are `mp_rank_YY_model_states.pt`, where YY is the tensor-parallel rank. They contain
    # no optimizer state, so GPT-NeoX loads them only with `no_load_optim: true`.
    counters = {"iteration": step, "global_steps": step, "global_samples": 0, "skipped_steps": 0}
    sizes = {"dp_world_size": 1, "mp_world_size": shape.parts}
    absent = {"module": None, "optimizer": None, "csr_tensor_module_names": set()}
    for rank in range(shape.parts):
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save(absent | counters | sizes | state, path)


def _config_of(record: Record) -> Config:
    """Return the configuration of the run that wrote a checkpoint of this project."""
    given = [f"{key}={json.dumps(value)}" for key, value in record.config.items()]
    degrees = [n for key, n in record.layout.items() if key.endswith("_parallel_size")]
    return load_config([], given, world_size=math.prod(degrees))


def _needs_newer_neox(block: BlockShape, activation: str) -> bool:
    """Return whether a block needs a version of gpt-neox that is newer than KERPLE's release."""
    plain = BlockShape(block.hidden_size, block.num_heads, activation=activation)
    options = ("attention_bias", "mlp_bias", "group", "qk_norm", "mlp_size")
    changed = any(getattr(block, name) != getattr(plain, name) for name in options)
    return changed or (activation in GATED and activation != "geglu")


def _not_in_newer_neox(config: Config, block: BlockShape, pos: PositionalEmbedding) -> str | None:
    """Return why versions of gpt-neox from 2024 on cannot run this model; None if they can."""
    if pos.name not in ("learned", "rotary", "sinusoidal", "rpe", "alibi", "none"):
        return f"has no pos_emb {pos.name}"
    if block.qk_norm and block.norm == "layernorm":
        return "takes the mean of use_qk_layernorm over all heads, not of each head"
    if not block.mlp_bias and config.model.gpt_j_residual:
        return "leaves out attention with gpt_j_residual and without biases in the MLP"
    if not block.mlp_bias and config.model.activation not in GATED:
        return f"cannot compute {config.model.activation} without biases in the MLP"
    if block.norm == "rmsnorm" and not config.model.rmsnorm_fusion:
        return "adds rms_norm_epsilon inside the root (here with rmsnorm_fusion: true)"
    return None


def _shape_of(config: Config, block: BlockShape, pos: PositionalEmbedding) -> Shape:
    m = config.model
    head = _needs_newer_neox(block, m.activation)
    windows = m.sliding_window_width
    lacking = {
        f"pos_emb {pos.name}": pos.name not in layout.EMBEDDINGS,
        "rope_scaling": m.rope_scaling,
        "attention_output_gate": m.attention_output_gate,
        "head_dim": block.head_dim is not None,
        "qk_layernorm_kind": m.qk_layernorm_kind != "by_head",
        "output_norms": m.output_norms,
        "add_qkv_bias": m.add_qkv_bias and not m.use_bias_in_attn_linear,
        "gpt_j_tied": m.gpt_j_tied,
        "output_layer_bias": m.output_layer_bias,
        "pos_emb_options": m.pos_emb_options,
        "theta_per_layer": m.theta_per_layer,
        "windows of single layers": isinstance(windows, tuple),
        "sliding_window_width": windows is not None and not head,
        "rmsnorm_fusion": m.norm == "rmsnorm" and m.rmsnorm_fusion and not head,
    }
    if key := next((key for key, lacks in lacking.items() if lacks), None):
        raise CheckpointError(
            f"the published code has no {key}, so this checkpoint cannot be exported to it"
        )
    if head and (why := _not_in_newer_neox(config, block, pos)):
        raise CheckpointError(f"gpt-neox {why}, so this checkpoint cannot be exported to it")
    return Shape(
        num_layers=m.num_layers, tied=not m.no_weight_tying, theta=layout.theta_names(pos),
        geglu=m.activation in GATED, head=head, group=block.group, head_size=block.head_size,
        parts=config.parallel.model_parallel_size, summed_biases=m.gpt_j_residual,
        row_output=m.output_layer_parallelism == "row",
    )  # fmt: skip


def _args_of(config: Config, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return the settings that GPT-NeoX compares with its config when it loads an export."""
    m = config.model
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    found = {name: getattr(m, name) for name in (*names, "make_vocab_size_divisible_by")}
    size, kind = len(weights[WORDS]), config.data.tokenizer_type
    return found | {"padded_vocab_size": size, "tokenizer_type": kind}
