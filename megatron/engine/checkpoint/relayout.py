"""Resuming in another layout, through DeepSpeed's universal checkpoint format.

A checkpoint is converted into one folder per parameter with its whole fp32 weight and optimizer
moments, and every rank of the new layout takes its parts out of it. The converter is told by name
how each weight is cut; a pair of layouts it cannot serve is refused before anything is read.

What DeepSpeed 0.19 leaves undone is mended here: files of ZeRO-3 carry no shapes, each ZeRO stage
looks for counters under its own file name, and a load overwrites the clipping's bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants, ds_to_universal
from deepspeed.checkpoint.constants import CAT_DIM, PARAM, PARAM_N_SUB_PARAMS

from megatron.engine.checkpoint.files import why_not_written
from megatron.engine.errors import CheckpointError
from megatron.parallel import Groups

FREE = (
    "data_parallel_size",
    "model_parallel_size",
    "pipe_parallel_size",
    "context_parallel_size",
    "zero_stage",
    "sub_group_size",
)
"""What of a layout may change."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def conversion_info(about: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter must know, from `layout_weights.describe`: a pattern for every parameter.

    Patterns are whole names, so each parameter has exactly one.
    """
    cuts, layers = about["cuts"], about["layers"] or []

    def patterns(wanted: Any) -> list[str]:
        return [f"{re.escape(name)}$" for name in sorted(about["shapes"]) if wanted(name)]

    tied = {name for name in layers if layers.count(name) > 1}
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: 0.2,  # names alone: no widths of slices
        constants.TP_REPLICATED_PARAMETER_PATTERNS: patterns(lambda n: n not in cuts),
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: patterns(
            lambda n: n in cuts and cuts[n] == [1, 1]
        ),
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: patterns(
            lambda n: n in cuts and cuts[n] == [0, 2]
        ),
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: patterns(
            lambda n: n.rpartition(".")[0] in tied
        ),
    }


def refusal(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why a checkpoint of layout `old` cannot go on as `new`; None where it can."""
    fixed = [key for key in new if key not in FREE and old.get(key) != new[key]]
    if fixed:
        told = ", ".join(f"{key} {old.get(key)!r} to {new[key]!r}" for key in fixed)
        return f"a resumed run cannot change {told}"
    if new["optimizer"] != "adam":
        return f"the universal format holds Adam's state, not that of {new['optimizer']}"
    if 0 in (old["zero_stage"], new["zero_stage"]):
        return (
            "ZeRO-0 keeps its optimizer state where the universal format has no place for it "
            f"(zero_stage {old['zero_stage']} to {new['zero_stage']})"
        )
    if new["zero_stage"] == 3 and new["model_parallel_size"] > 1:
        return (
            "ZeRO-3 with model_parallel_size above 1 cannot take its slices out of the universal "
            "format; write zero_stage 1 or 2, or model_parallel_size: 1"
        )
    return None


def convert(
    source: Path,
    target: Path,
    record: Mapping[str, Any],
    cuts: Mapping[str, Any] | None = None,
    *,
    workers: int = 1,
) -> None:
    """Write the checkpoint folder `source` into `target` in the universal format.

    Args:
        record: the checkpoint's `kerple.json`.
        cuts: how the parameters will be cut (None: as they were).
        workers: processes; 1 converts in this one (a process with threads must not fork).

    Raises:
        CheckpointError: it cannot be converted; nothing is left of the attempt.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        target.mkdir(parents=True)
        _convert(source, target, workers)
        _complete_weights(target / "zero", record, record["cuts"] if cuts is None else cuts)
        _complete_counters(target)
    except Exception as error:  # the converter's many, among them those of a full disk
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(
            f"{source} cannot be converted into {target} ({why_not_written(target, error)}, and "
            "24 bytes a parameter are needed)"
        ) from error


def _convert(source: Path, target: Path, workers: int) -> None:
    """DeepSpeed's own part."""
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)


def _complete_weights(folder: Path, record: Mapping[str, Any], cuts: Mapping[str, Any]) -> None:
    """Give every tensor its shape, and every parameter the dimension to cut it by."""
    step = None
    for name, shape in record["shapes"].items():
        dim, blocks = cuts.get(name, (0, 1))
        for state in ("fp32", *MOMENTS):
            path = folder / name / f"{state}.pt"
            stored = torch.load(path, weights_only=False)
            tensor = stored[PARAM] if isinstance(stored, dict) else stored
            whole = {PARAM: tensor.flatten()[: torch.Size(shape).numel()].view(shape)}
            whole[CAT_DIM] = dim
            if blocks > 1:
                whole[PARAM_N_SUB_PARAMS] = blocks
            torch.save(whole, path)
        if (folder / name / "step.pt").exists():
            step = torch.load(folder / name / "step.pt", weights_only=False)
    common = torch.load(folder / "optimizer_state.pt", weights_only=False)
    inner = common.setdefault("optimizer_state_dict", {})
    if step is None:  # of ZeRO-3: one for all
        step = inner["state"][0]["step"]
        for name in record["shapes"]:
            torch.save(step, folder / name / "step.pt")
    inner["state"] = {0: {"step": step}}
    inner["param_groups"] = common["param_groups"]
    common.setdefault("ds_version", deepspeed.__version__)
    torch.save(common, folder / "optimizer_state.pt")


def _complete_counters(folder: Path) -> None:
    """One file of counters, under the names that ZeRO-1 and 2, and ZeRO-3, look for."""
    stored = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    counters = torch.load(stored[0], map_location="cpu", weights_only=False)
    counters["module"] = None  # weights are read from zero/
    counters["mp_world_size"] = 1
    for path in stored:
        path.unlink()
    for prefix in ("", "zero_pp_rank_0_"):
        torch.save(counters, folder / f"{prefix}mp_rank_00_model_states.pt")


def restore(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    source: Path,
    scratch: Path,
    record: Mapping[str, Any],
    cuts: Mapping[str, Any],
    changed: str,
) -> None:
    """Load the checkpoint folder `source`, written in another layout; every rank must call it.

    Args:
        cuts: of this run's parameters.
        changed: what is another in this layout, for the log.
        scratch: a folder to convert it in; removed afterwards.
    """
    converted = scratch / source.name
    if groups.is_main:
        print(f"converting {source} into this layout ({changed})", flush=True)
        begun = time.monotonic()
        try:
            convert(source, converted, record, cuts)
        except CheckpointError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        print(f"  converted in {time.monotonic() - begun:.1f} s", flush=True)
    groups.barrier()
    load(engine, converted)
    # Streams of the old ranks fit no new rank: each starts anew, in a way that can be repeated.
    torch.manual_seed(torch.initial_seed() + 1_000_003 * record["progress"]["step"])
    groups.barrier()
    if groups.is_main:
        shutil.rmtree(scratch)


def load(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Take this rank's parts out of a converted checkpoint; every rank must call it."""
    optimizer = engine.optimizer
    clip = getattr(optimizer, "clip_grad", None)
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder.parent), tag=folder.name)
    finally:
        engine._config.load_universal_checkpoint = False
    if clip is not None:
        optimizer.clip_grad = clip
    for state in optimizer.optimizer.state.values():
        if torch.is_tensor(state.get("step")):  # ZeRO-3 shares one, and each group would count it
            state["step"] = state["step"].clone()
