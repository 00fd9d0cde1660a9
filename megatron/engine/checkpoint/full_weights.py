"""Read unsharded weights from a checkpoint of many ranks, and copy them into sharded models.

The files that contain the weights depend on the ZeRO stage, and on whether the run has a pipeline.
In their names, TT is the tensor-parallel rank, D the data-parallel rank and LL the layer:

    ZeRO 0, 1, 2   mp_rank_TT_model_states.pt, entry "module": the weights of rank TT
    pipeline       layer_LL-model_TT-model_states.pt: the weights of layer LL on rank TT
    ZeRO 3         zero_pp_rank_D_mp_rank_TT_*_states.pt: flat fp32 partitions

The entry `cuts` of `kerple.json` names each sharded weight, and the dimension that is sharded.
"""

import io
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.engine.checkpoint.record import Record
from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import only_safe_loads, safe_load
from megatron.parallel.groups import Groups
from megatron.parallel.sharding import Sharding, full_shape, local_slice, shardings_of

Weights = dict[str, Tensor]


def describe(model: nn.Module, groups: Groups) -> dict[str, Any]:
    """Return the shapes and the sharding of the weights of `model`, as JSON values.

    Every rank must call this function with its own tensor-parallel shard of the model.
    """
    # The keys are `shapes`, `cuts` and `layers` of `RunDescription`.
    cuts = {name: [cut.dim, cut.blocks] for name, cut in shardings_of(model).items()}
    return {
        "shapes": {name: list(shape) for name, shape in full_shapes(model, groups).items()},
        "cuts": groups.union_over_pipe(cuts),
        "layers": getattr(model, "layer_names", None),
    }


def read_full(checkpoint: Path, record: Record) -> Weights:
    """Read all weights of a checkpoint. Return a dict from name to unsharded weight.

    Raises:
        CheckpointError: A file is missing or damaged. The error message names the file.
    """
    # Weights have the dtype in which they are stored. A ZeRO-3 checkpoint stores only the fp32
    # copies that the optimizer updates, so the result contains these copies.
    ranks = range(record.layout["model_parallel_size"])
    if record.layers:
        shards = [_read_layers(checkpoint, record.layers, rank) for rank in ranks]
    else:
        read = _read_stage3 if record.layout["zero_stage"] == 3 else _read_rank
        shards = [read(checkpoint, rank) for rank in ranks]
    first, cuts = shards[0], record.cuts
    if len(shards) == 1:
        return first
    return {
        name: Sharding(*cuts[name]).join([each[name] for each in shards]) if name in cuts else value
        for name, value in first.items()
    }


def _read_rank(checkpoint: Path, rank: int) -> Weights:
    path = checkpoint / f"mp_rank_{rank:02d}_model_states.pt"
    content = safe_load(path)
    return _tensors(path, content.get("module") if isinstance(content, dict) else None)


def _tensors(path: Path, content: Any) -> Weights:
    """Return `content` if it maps names to tensors.

    Args:
        path: The file that contains `content`, for the error message.

    Raises:
        CheckpointError: `content` does not map names to tensors.
    """
    if isinstance(content, dict) and all(isinstance(each, Tensor) for each in content.values()):
        return content
    raise CheckpointError(f"{path}: does not hold tensors by name")


def _read_layers(checkpoint: Path, layers: Sequence[str], rank: int) -> Weights:
    found = {}
    for index, name in enumerate(layers):
        path = checkpoint / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"
        if name in layers[:index]:  # a tied layer is written only where it comes first
            continue
        found |= {f"{name}.{key}": value for key, value in _tensors(path, safe_load(path)).items()}
    return found


def _read_stage3(checkpoint: Path, rank: int) -> Weights:
    """Read the ZeRO-3 weights of one tensor-parallel rank with DeepSpeed's converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # The converter reads all files of a folder, so the folder holds only this rank's files.
    with tempfile.TemporaryDirectory() as links:
        for path in checkpoint.glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_*_states.pt"):
            (Path(links) / path.name).symlink_to(path.resolve())
        silent = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())  # progress bars
        with silent[0], silent[1], only_safe_loads():
            found = get_fp32_state_dict_from_zero_checkpoint(links, tag=".")
    return cast(Weights, found)  # None only with `lazy_mode`


def full_shapes(model: nn.Module, groups: Groups | None) -> dict[str, torch.Size]:
    """Return a dict from parameter name to unsharded shape.

    The dict contains the parameters of all pipeline stages.

    Args:
        groups: The job's process groups; None in a job of one process.
    """
    local = {name: full_shape(param) for name, param in model.named_parameters()}
    return local if groups is None else groups.union_over_pipe(local)


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy this tensor-parallel rank's slice of each unsharded weight into `model`.

    Call this function before a DeepSpeed engine is built from `model`. A parameter without an entry
    in `weights` keeps its value.
    """
    for name, param in model.named_parameters():
        if name in weights:
            param.copy_(local_slice(param, weights[name]))
