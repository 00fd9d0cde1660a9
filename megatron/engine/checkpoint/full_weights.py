"""The whole model's weights, out of a checkpoint that many ranks wrote, and into a model that many
ranks hold.

Files of one checkpoint, by ZeRO stage (t tensor-parallel rank, d data-parallel rank):

    0, 1, 2   mp_rank_TT_model_states.pt, entry "module": the weights of rank t
    pipeline  layer_LL-model_TT-model_states.pt: each layer's weights, by their names within it
    3         zero_pp_rank_D_mp_rank_TT_*_states.pt: flat fp32 pieces

`kerple.json` holds under "cuts" which weights are slices, and of which dimension.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import safe_load
from megatron.parallel import Groups, Sharding, full_shape, local_slice, shardings_of

Weights = dict[str, Tensor]


def describe(model: nn.Module, groups: Groups) -> dict[str, Any]:
    """What `kerple.json` keeps about the weights' files; every rank must call it.

    shapes: parameter name -> shape, whole.
    cuts: parameter name -> [dimension, blocks], see `megatron.parallel.Sharding`.
    layers: names of a pipeline's layers, in the order of its files.
    """
    cuts = {name: [cut.dim, cut.blocks] for name, cut in shardings_of(model).items()}
    return {
        "shapes": {name: list(shape) for name, shape in whole_shapes(model, groups).items()},
        "cuts": groups.union_over_pipe(cuts),
        "layers": getattr(model, "layer_names", None),
    }


def read_whole(folder: Path, tag: str, record: Mapping[str, Any]) -> Weights:
    """Every weight by name, whole. 16-bit weights come as stored, those of ZeRO-3 as fp32 masters.

    Args:
        record: the checkpoint's `kerple.json`.

    Raises:
        CheckpointError: names the file that is missing or damaged.
    """
    layout, cuts, layers = record["layout"], record.get("cuts", {}), record.get("layers")
    sizes = range(layout.get("model_parallel_size", 1))
    if layers:
        ranks = [_read_layers(folder / tag, layers, rank) for rank in sizes]
    else:
        read = _read_stage3 if layout["zero_stage"] == 3 else _read_rank
        ranks = [read(folder, tag, rank) for rank in sizes]
    first = ranks[0]
    if len(ranks) == 1:
        return first
    return {
        name: Sharding(*cuts[name]).join([rank[name] for rank in ranks]) if name in cuts else value
        for name, value in first.items()
    }


def _read_rank(folder: Path, tag: str, rank: int) -> Weights:
    path = folder / tag / f"mp_rank_{rank:02d}_model_states.pt"
    try:
        return safe_load(path)["module"]
    except KeyError as error:
        raise CheckpointError(f"{path}: cannot be read (no entry {error})") from error


def _read_layers(folder: Path, layers: Sequence[str], rank: int) -> Weights:
    found = {}
    for index, name in enumerate(layers):
        path = folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"
        if name in layers[:index]:  # a tied layer is written where it comes first
            continue
        found |= {f"{name}.{key}": value for key, value in safe_load(path).items()}
    return found


def _read_stage3(folder: Path, tag: str, rank: int) -> Weights:
    """DeepSpeed's converter knows no tensor parallelism: it is shown one such rank at a time.

    Its prints are swallowed: what goes wrong, it raises.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory() as shown:
        for path in (folder / tag).glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_*_states.pt"):
            (Path(shown) / path.name).symlink_to(path.resolve())
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # and progress bars
            return get_fp32_state_dict_from_zero_checkpoint(shown, tag=".")


def whole_shapes(model: nn.Module, groups: Groups | None) -> dict[str, torch.Size]:
    """Parameter name -> shape before it was cut, of the whole model (None: a job of one)."""
    own = {name: full_shape(param) for name, param in model.named_parameters()}
    return own if groups is None else groups.union_over_pipe(own)


@torch.no_grad()
def fill(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy each whole weight's own part into `model`, before an engine takes it."""
    for name, param in model.named_parameters():
        param.copy_(local_slice(param, stored[name]))
