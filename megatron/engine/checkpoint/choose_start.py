"""Decide where a job starts: at step 0, or from a checkpoint.

| `load` names | the job starts with |
|---|---|
| nothing, or the folder `save` if it contains no checkpoint | step 0 and initial weights |
| a checkpoint of this code | its step, weights, optimizer, schedule and random streams |
| a checkpoint of GPT-NeoX, or an imported one | its step and weights; zero optimizer moments |
| any checkpoint, with `finetune: true` | step 0 and its weights |
| any checkpoint, with `train_iters: 0` | its step and weights, for evaluation only |

`load` names either a checkpoint or a run folder. In a run folder, the file `latest` names the
checkpoint.

The job ignores `load` and resumes from the checkpoint in the folder `save` if the checkpoint
belongs to a run that began from the same `load`. With `finetune: true`, it also does so if `load`
is missing or names the folder `save`.
"""

import json
from collections.abc import Callable
from pathlib import Path

from megatron.config import Config
from megatron.engine.checkpoint.publish import remove_unfinished
from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.checkpoint.resume import Start
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished
from megatron.engine.errors import CheckpointError
from megatron.engine.job.agreement import seen_by_all
from megatron.engine.job.lease import leases
from megatron.parallel.groups import Groups
from megatron.run_folder import RunFolder, is_checkpoint

_NOTED = {
    "train_batch_size": "samples go on in the same order",
    "sliding_window_width": "each layer sees other tokens",
    "reset_attention_mask": "tokens see other documents",
}


def choose_start(
    config: Config, groups: Groups, train_samples: int, *, allow_fallback: bool = False
) -> Start:
    """Examine the config's folders `load` and `save`, and decide where the job starts.

    Every rank must call this function.

    Args:
        train_samples: The number of samples for which this run's training index is built. The index
            determines the order of the training samples.
        allow_fallback: Whether to skip damaged checkpoints, and start from the newest intact one.

    Raises:
        CheckpointError: A checkpoint is damaged, there is no checkpoint to evaluate, or this run
            would overwrite the checkpoints of another run in `save`.
    """
    save = Path(config.checkpoint.save) if config.checkpoint.save else None
    if save and config.training.train_iters > 0:
        seen_by_all(lambda: leases(save), save, groups)  # rank 0 holds a lease like no other
        removed = remove_unfinished(save) if groups.is_main else []
        if removed:
            print(f"removed what a killed run left half written: {', '.join(removed)}")
    groups.barrier()
    skipped: list[str] = []

    def newest_usable(folder: Path | None) -> Saved | None:
        if folder is None:
            return None
        saved, damaged = usable(folder, groups, allow_fallback=allow_fallback)
        skipped.extend([damaged] if damaged else [])
        return saved

    start = _decide(config, newest_usable, train_samples)
    start.save = save
    if skipped:
        start.text += f" (passed over: {'; '.join(skipped)})"
    return start


def usable(folder: Path, groups: Groups, *, allow_fallback: bool) -> tuple[Saved | None, str]:
    """Return the checkpoint to start from, and a text that names damaged files.

    The file `folder/latest` names the checkpoint. If `folder` is itself a checkpoint, return that
    checkpoint. The result is (None, "") if `folder` has no checkpoint. The text is "" if no damage
    was found. Every rank must call this function.

    Args:
        allow_fallback: Whether to skip a damaged checkpoint. If so, return the newest intact
            checkpoint of an earlier step or, if there is none, of a later step.

    Raises:
        CheckpointError: The checkpoint is damaged or, with `allow_fallback`, `folder` has no intact
            checkpoint. The error message names the damaged files.
    """

    def look() -> tuple[list[Saved], Saved | None, str]:
        if is_checkpoint(folder):
            return [], Saved(folder.resolve().parent, folder.resolve().name), ""
        tag, problem = RunFolder(folder).newest_tag()
        return finished(folder)[::-1], Saved(folder, tag) if tag else None, problem

    candidates, latest, problem = seen_by_all(look, folder, groups)
    found = [problem] if problem else []
    if problem and not (allow_fallback and candidates):
        raise CheckpointError(problem)
    if latest is not None:
        others = [each for each in candidates if each != latest]
        older = candidates.index(latest) if latest in candidates else 0
        candidates = [latest, *others[older:], *others[:older]]
    elif not problem:
        return None, ""
    for number, saved in enumerate(candidates):
        problem = saved.damage(groups)
        if problem is None:
            return saved, "; ".join(found)
        found.append(problem)
        if not allow_fallback:
            before = candidates[number + 1 : number + 2]
            way = f"resume from {before[0].path} with --allow-fallback, or " if before else ""
            raise CheckpointError(
                f"{saved.path} is damaged: {problem}. Restore that file, or {way}"
                "name another `save` to start from step 0"
            )
    raise CheckpointError(f"{folder} holds no intact checkpoint: " + "; ".join(found))


def _decide(
    config: Config, usable: Callable[[Path | None], Saved | None], train_samples: int
) -> Start:
    """Decide where the job starts.

    Args:
        usable: A function that returns the newest usable checkpoint of a folder. It returns None
            if the folder contains no checkpoint.
    """
    c, trains = config.checkpoint, config.training.train_iters > 0
    save, load = (Path(name) if name else None for name in (c.save, c.load))
    fresh = TrainingProgress(0, 0, train_samples)
    continues = save is not None and load is not None and save.resolve() == load.resolve()
    saved = usable(save) if trains or continues else None
    if trains and saved and save and saved.path == save.resolve():
        raise CheckpointError(f"save: {save} is one checkpoint; name the folder that holds it")
    if load and trains and saved and saved.kind == "ours":
        # the same command again: the run in `save` began from this `load`
        before = saved.record.config.get("load")
        continues |= before is not None and Path(before).resolve() == load.resolve()
    if saved and c.finetune and trains and (continues or not load):
        return Start(fresh, f"resuming the finetuning from {saved.path}", saved, resumes=True)
    loaded = saved if continues else usable(load)
    if trains and saved and not continues:
        raise CheckpointError(
            f"save: {save} holds a checkpoint already ({saved.tag}), and this run does not "
            f"continue it; write `load: {save}` to continue, or another `save` for a new run"
        )
    if not load:
        return Start(fresh, "starting fresh: no `load` in the config")
    if not loaded:
        if not trains:
            raise CheckpointError(
                f"{load} holds no checkpoint (no file `latest`), and train_iters: 0 does nothing "
                "but evaluate one; name the folder that holds `latest`"
            )
        if not continues:
            way = "name a run folder or its global_stepN, or leave `load` out to start from step 0"
            if (load / "config.json").is_file():
                way = "tools/import_hf.py imports a model of transformers"
            raise CheckpointError(
                f"load: {load} holds no checkpoint, and only the folder `save` may be empty; {way}"
            )
        return Start(fresh, f"starting fresh: {load} holds no checkpoint")
    if c.finetune:
        text = f"starting at step 0 from the weights of {loaded.path} (finetune)"
        return Start(fresh, text, loaded)
    if trains and loaded.kind == "ours":
        text = f"resuming from {loaded.path}{_other_values(config, loaded)}"
        return Start(fresh, text, loaded, resumes=True)
    return _from_weights(config, loaded, train_samples)


def _other_values(config: Config, saved: Saved) -> str:
    """Return warnings about keys that differ from the checkpoint's values, otherwise ""."""
    lines, given = "", config.to_flat_dict()  # without keys that are None
    for key, effect in _NOTED.items():
        default = None if key == "sliding_window_width" else given[key]
        here, there = map(json.dumps, (given.get(key), saved.record.config.get(key, default)))
        if here != there:
            lines += (
                f"\n{key} is {here}, and was {there} until now: {effect}, "
                f"but losses will not be those of one run; write {key}: {there} for them"
            )
    return lines


def _from_weights(config: Config, saved: Saved, train_samples: int) -> Start:
    """Return a `Start` that begins at the checkpoint's step and loads only the weights."""
    step, schedule = saved.counters
    text = f"evaluating {saved.path}, trained for {step} steps"
    if config.training.train_iters > 0:
        text = (
            f"going on at step {step} from the weights of {saved.path}, which has no optimizer: "
            "its moments start at zero, samples are counted as step x train_batch_size"
        )
    progress = TrainingProgress(step, step * config.batch.train_batch_size, train_samples)
    return Start(progress, text, saved, schedule=schedule)
