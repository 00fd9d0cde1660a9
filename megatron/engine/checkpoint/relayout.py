"""Resume a run in another parallel layout, through DeepSpeed's universal checkpoint format.

DeepSpeed's converter writes one folder for each parameter, with the unsharded fp32 weight and
optimizer moments. Every rank of the new layout reads its slices from these folders. The converter
needs a list of the parameters for each way of sharding (see `conversion_info`). If the converter
does not support the change from the old to the new layout, the run ends with an error before any
file is converted.

This module also works around five faults of DeepSpeed 0.19:

- Converted ZeRO-3 files contain no shapes.
- ZeRO-3 expects the run's counters in a file of another name than ZeRO-1 and ZeRO-2 do.
- Loading a checkpoint overwrites the norm to which gradients are clipped.
- Paths are read as patterns (`plain_path`).
- Loading fails on a rank that has nothing but the padding of a group of parameters.
"""

import argparse
import contextlib
import io
import multiprocessing
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.checkpoint import constants, ds_to_universal
from deepspeed.checkpoint.constants import CAT_DIM, PARAM, PARAM_N_SUB_PARAMS

from megatron.engine.checkpoint.publish import why_not_written
from megatron.engine.checkpoint.record import Record, RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import only_safe_loads, safe_load
from megatron.files import plain_path
from megatron.parallel.groups import Groups
from megatron.parallel.rng import derived_seed

FREE = """
data_parallel_size model_parallel_size pipe_parallel_size context_parallel_size zero_stage
sub_group_size"""
"""The entries of a layout that may differ between a checkpoint and the run that resumes it."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def conversion_info(run: RunDescription) -> dict[str, Any]:
    """Return what DeepSpeed's converter needs to know about the sharding of each parameter."""
    # The dictionary maps each way of sharding, e.g. row-parallel, to regular expressions for the
    # names of the parameters that are sharded in this way.
    cuts, layers = run.cuts, run.layers or []

    def patterns(wanted: Callable[[str], bool]) -> list[str]:
        return [f"{re.escape(name)}$" for name in sorted(run.shapes) if wanted(name)]

    tied = {name for name in layers if layers.count(name) > 1}
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: 0.2,  # in this version, patterns have no shapes
        constants.TP_REPLICATED_PARAMETER_PATTERNS: patterns(lambda n: n not in cuts),
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: patterns(
            lambda n: cuts.get(n) == [1, 1]
        ),
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: patterns(lambda n: cuts.get(n) == [0, 2]),
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: patterns(
            lambda n: n.rpartition(".")[0] in tied
        ),
    }


def why_not_resumed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why a run cannot resume with the parallel layout `new`, or None if it can.

    Args:
        old: The parallel layout of the checkpoint.
        new: The parallel layout of this run.
    """
    fixed = [key for key in new if key not in FREE.split() and old.get(key) != new[key]]
    if fixed:
        changes = ", ".join(f"{key} {old.get(key)!r} to {new[key]!r}" for key in fixed)
        return f"a resumed run cannot change {changes}"
    if new.get("optimizer") != "adam":
        return f"the universal format holds Adam's state, not that of {new.get('optimizer')}"
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
    saved: Saved, scratch: Path, cuts: Mapping[str, Any] | None = None, *, workers: int = 1
) -> Path:
    """Convert the checkpoint `saved` into DeepSpeed's universal format, in the folder `scratch`.

    Args:
        scratch: The folder for the result; its previous content is removed.
        cuts: Maps each sharded parameter's name to how it is sharded. None keeps the checkpoint's
            sharding.
        workers: The number of processes to use. It must be 1 if the calling process has threads.

    Returns:
        The converted checkpoint's folder, `scratch/global_stepN`.

    Raises:
        CheckpointError: The checkpoint cannot be converted. The folder `scratch` is then removed.
    """
    # A process with threads must not fork. With 1 worker, no new process is started. `cuts` has the
    # form of `RunDescription.cuts`.
    target = scratch / saved.tag
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        target.mkdir(parents=True)
        with only_safe_loads():
            with plain_path(saved.folder) as source, plain_path(scratch) as result:
                _run_converter(source / saved.tag, result / saved.tag, workers)
            cuts = saved.record.cuts if cuts is None else cuts
            _complete_weights(target / "zero", saved.record, cuts)
            _complete_counters(target)
    except Exception as error:  # the converter raises many kinds, also on a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{saved.path} cannot be converted into {target} ({why_not_written(target, error)}, "
            "and 24 bytes a parameter are needed)"
        ) from error
    return target


def _run_converter(source: Path, target: Path, workers: int) -> None:
    """Call DeepSpeed's converter without its console output."""
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    # Forked workers inherit `only_safe_loads`; others would refuse DeepSpeed's own classes.
    pool = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("fork"))
    forked = mock.patch.object(ds_to_universal, "ProcessPoolExecutor", pool)
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with forked, silent[0], silent[1]:
        ds_to_universal.main(arguments)


def _complete_weights(folder: Path, record: Record, cuts: Mapping[str, Any]) -> None:
    """Add what DeepSpeed's converter left out to the files of each parameter in `folder`.

    These are the unsharded shape, the sharded dimension and the number of optimizer steps.
    """
    step = None
    for name, shape in record.shapes.items():
        dim, blocks = cuts.get(name, (0, 1))
        for state in ("fp32", *MOMENTS):
            path = folder / name / f"{state}.pt"
            stored = safe_load(path, mmap=False)  # the file is replaced
            tensor = stored[PARAM] if isinstance(stored, dict) else stored
            full = {PARAM: tensor.flatten()[: torch.Size(shape).numel()].view(shape)}
            full[CAT_DIM] = dim
            if blocks > 1:
                full[PARAM_N_SUB_PARAMS] = blocks
            torch.save(full, path)
        if (folder / name / "step.pt").exists():
            step = safe_load(folder / name / "step.pt")
    common = safe_load(folder / "optimizer_state.pt", mmap=False)
    inner = common.setdefault("optimizer_state_dict", {})
    if step is None:  # ZeRO-3 stores one step for all parameters
        step = inner["state"][0]["step"]
        for name in record.shapes:
            torch.save(step, folder / name / "step.pt")
    inner["state"] = {0: {"step": step}}
    inner["param_groups"] = common["param_groups"]
    common.setdefault("ds_version", deepspeed.__version__)
    torch.save(common, folder / "optimizer_state.pt")


def _complete_counters(folder: Path) -> None:
    """Replace the files `*_model_states.pt` by two files that contain only the run's counters."""
    # The counters are copied from the first of these files.
    stored = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    counters = safe_load(stored[0], mmap=False)
    counters |= {"module": None, "mp_world_size": 1}  # weights are read from zero/
    for path in stored:
        path.unlink()
    # ZeRO-1 and ZeRO-2 read the first of these names, and ZeRO-3 reads the second.
    for prefix in ("", "zero_pp_rank_0_"):
        torch.save(counters, folder / f"{prefix}mp_rank_00_model_states.pt")


def restore(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    saved: Saved,
    scratch: Path,
    cuts: Mapping[str, Any],
    changed: str,
) -> None:
    """Convert `saved` to this run's parallel layout, and load the result into `engine`.

    Every rank must call this function. Afterwards, dropout uses new random streams.

    Args:
        saved: The checkpoint.
        scratch: The folder in which the checkpoint is converted; it is removed afterwards.
        cuts: Maps each sharded parameter's name to how this run shards it.
        changed: A text for the log that lists the differences between the two layouts.
    """
    if groups.is_main:
        print(f"converting {saved.path} into this layout ({changed})", flush=True)
        begun = time.monotonic()
        convert(saved, scratch, cuts)
        print(f"  converted in {time.monotonic() - begun:.1f} s", flush=True)
    groups.barrier()
    load(engine, scratch / saved.tag)
    # The random streams of the old ranks fit no new rank, so each rank starts a reproducible one.
    torch.manual_seed(derived_seed(torch.initial_seed(), f"step {saved.step}"))
    groups.barrier()
    if groups.is_main:
        shutil.rmtree(scratch)


def load(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Load this rank's slices of a converted checkpoint. Every rank must call this function."""
    optimizer: Any = engine.optimizer  # DeepSpeed's wrapper of Adam
    settings: Any = engine._config
    settings.load_universal_checkpoint = True
    try:
        with only_safe_loads(), _padding_skipped(optimizer), plain_path(folder.parent) as path:
            engine.load_checkpoint(str(path), tag=folder.name)
    finally:
        settings.load_universal_checkpoint = False
    for state in optimizer.optimizer.state.values():
        # Fused Adam needs the step on the device. Each ZeRO-3 group would count a shared tensor.
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(engine.device, copy=True)


@contextlib.contextmanager
def _padding_skipped(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed load a group of parameters of which this rank has nothing but padding."""
    # DeepSpeed 0.19 asks the first parameter of such a group for its step, and there is none.
    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", [])
    stub = SimpleNamespace(get_optim_state_keys=list)
    with contextlib.ExitStack() as stack:
        for params in groups:
            if all(getattr(param, "_hp_mapping", stub) is None for param in params):
                replaced = {"_hp_mapping": stub, "load_hp_checkpoint_state": lambda *_, **__: None}
                stack.enter_context(mock.patch.multiple(params[0], **replaced))
        yield
