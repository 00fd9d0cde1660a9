"""Where a job starts: afresh, from a checkpoint's weights, or exactly where one left off.

| `load` names | start |
|---|---|
| nothing, or a folder without a checkpoint | step 0, initial weights |
| a checkpoint of this code | where it left off: weights, optimizer, schedule, random streams |
| any checkpoint, with `finetune: true` | step 0, its weights (`save` resumes, if it has begun) |
| a published or imported checkpoint | its step and weights; the optimizer's moments are zero |
| any checkpoint, with `train_iters: 0` | its step and weights, to be evaluated only |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.engine.checkpoint import saved as checkpoint
from megatron.engine.checkpoint.files import remove_unfinished
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved import CheckpointError, Progress
from megatron.engine.checkpoint.usable import usable
from megatron.engine.job.agreement import require_one_folder
from megatron.engine.neox.counters import counters
from megatron.engine.neox.read import is_published
from megatron.engine.training.optimizer import keep_hyperparameters
from megatron.engine.training.schedule import AnnealingLR
from megatron.parallel import Groups

if TYPE_CHECKING:
    import deepspeed

    from megatron.engine.training.pipeline import Model

About = dict[str, dict[str, Any]]
"""What a checkpoint says of its run: model and data, which must agree, its layout, its weights."""


@dataclass
class Start:
    """A decision; `load_weights` before the engine is built, `finish` after.

    Attributes:
        progress: where the job begins.
        text: lines that say so.
        folder, tag: the checkpoint; None for a fresh start.
        resumes: everything is taken, not the weights alone.
        schedule: a published checkpoint's learning-rate curve, for `use_checkpoint_lr_scheduler`.
        save: where the job saves, if it does.
    """

    progress: Progress
    text: str
    folder: Path | None = None
    tag: str = ""
    resumes: bool = False
    schedule: dict[str, Any] | None = None
    save: Path | None = None

    def load_weights(self, model: Model, about: About, groups: Groups) -> None:
        """Into the model, where weights alone are taken: before an engine copies them."""
        if self.folder is not None and not self.resumes:
            notes = load_weights(model, self.folder, self.tag, about["model"], groups)
            self.text = "\n".join([self.text, *notes])

    def finish(
        self,
        engine: deepspeed.DeepSpeedEngine,
        annealing: AnnealingLR,
        groups: Groups,
        about: About,
    ) -> Progress:
        """The engine's part; every rank must call it."""
        step = self.progress.step
        if self.resumes:
            same = {subject: about[subject] for subject in checkpoint.WAYS_OUT}
            checkpoint.require_same(self.folder, self.tag, same)
            with keep_hyperparameters(annealing):
                self.progress = checkpoint.restore(
                    engine, groups, self.folder, self.tag, about, self.save or self.folder
                )
        elif step:
            curve = self.schedule or annealing.state_dict()
            annealing.load_state_dict(curve | {"num_iters": step})
            engine.global_steps = step
        return self.progress


def choose_start(
    config: Config, groups: Groups, train_samples: int, *, allow_fallback: bool = False
) -> Start:
    """Look at `load` and `save` and decide; every rank must call it.

    Args:
        train_samples: samples that this run's training index is built for.
        allow_fallback: pass over damaged checkpoints to the newest whole one.

    Raises:
        CheckpointError: a checkpoint is damaged; `save` holds another run's, which would be
            replaced one by one; or there is nothing to evaluate.
    """
    save = config.checkpoint.save
    if save and config.training.train_iters > 0:
        require_one_folder(groups, Path(save))
    if save and groups.is_main:
        left = remove_unfinished(Path(save))
        if left:
            print(f"removed what a killed run left half written: {', '.join(left)}")
    groups.barrier()
    passed_over: list[str] = []

    def newest_usable(folder: Path | None) -> str | None:
        if folder is None:
            return None
        tag, damaged = usable(folder, groups, allow_fallback=allow_fallback)
        passed_over.extend([damaged] if damaged else [])
        return tag

    start = _decide(config, newest_usable, train_samples)
    start.save = Path(save) if save else None
    if passed_over:
        start.text += f" (passed over: {'; '.join(passed_over)})"
    return start


def _decide(
    config: Config, usable: Callable[[Path | None], str | None], train_samples: int
) -> Start:
    """Where to start; `usable` gives a folder's newest checkpoint."""
    c, trains = config.checkpoint, config.training.train_iters > 0
    save, load = (Path(name) if name else None for name in (c.save, c.load))
    fresh = Progress(0, 0, train_samples)
    continues = bool(save and load) and save.resolve() == load.resolve()
    saved = usable(save) if trains or continues else None
    if saved and c.finetune and trains:
        text = f"resuming the finetuning from {save / saved}"
        return Start(fresh, text, save, saved, resumes=True)
    loaded = saved if continues else usable(load)
    if trains and saved and not continues:
        raise CheckpointError(
            f"save: {save} holds a checkpoint already ({saved}), and this run does not "
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
        return Start(fresh, f"starting fresh: {load} holds no checkpoint")
    if c.finetune:
        text = f"starting at step 0 from the weights of {load / loaded} (finetune)"
        return Start(fresh, text, load, loaded)
    if trains and not checkpoint.is_foreign(load, loaded):
        text = f"resuming from {load / loaded}{_other_batch(config, load, loaded)}"
        return Start(fresh, text, load, loaded, resumes=True)
    return _from_weights(config, load, loaded, train_samples)


def _other_batch(config: Config, folder: Path, tag: str) -> str:
    """What to say where steps now read another number of samples, as more processes make them."""
    here = config.batch.train_batch_size
    there = checkpoint.read_record(folder, tag).get("config", {}).get("train_batch_size", here)
    if there == here:
        return ""
    return (
        f"\ntrain_batch_size is {here}, and was {there} until now: samples go on in the same "
        f"order, but losses will not be those of one run; write train_batch_size: {there} for them"
    )


def _from_weights(config: Config, folder: Path, tag: str, train_samples: int) -> Start:
    """At the checkpoint's step, with its weights alone."""
    where = folder / tag
    if is_published(where):
        step, schedule = counters(where)
    else:
        record = checkpoint.read_record(folder, tag)
        step, schedule = record["progress"]["step"], record.get("imported", {}).get("schedule")
    text = f"evaluating {where}, trained for {step} steps"
    if config.training.train_iters > 0:
        text = (
            f"going on at step {step} from the weights of {where}, a published checkpoint: the "
            "optimizer's moments start at zero, samples are counted as step x train_batch_size"
        )
    progress = Progress(step, step * config.batch.train_batch_size, train_samples)
    return Start(progress, text, folder, tag, schedule=schedule)
