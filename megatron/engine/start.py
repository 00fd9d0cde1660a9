"""Where a job starts: afresh, from a checkpoint's weights, or exactly where one left off.

| `load` names | start |
|---|---|
| nothing, or a folder without a checkpoint | step 0, initial weights |
| a checkpoint of this code | where it left off: weights, optimizer, schedule, random streams |
| the same, with `finetune: true` | step 0, its weights |
| a published or imported checkpoint | its step and weights; the optimizer's moments are zero |
| any of them, with `train_iters: 0` | its step and weights, to be evaluated only |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.engine import checkpoint
from megatron.engine.checkpoint import CheckpointError, Progress
from megatron.engine.neox_checkpoint import counters, is_published
from megatron.engine.weights import load_weights
from megatron.model import GPT
from megatron.parallel import Groups

if TYPE_CHECKING:
    import deepspeed


@dataclass
class Start:
    """A decision; `load_weights` before the engine is built, `finish` after.

    Attributes:
        folder, tag: the checkpoint; None for a fresh start.
        resumes: everything is taken, not the weights alone.
        schedule: a published checkpoint's learning-rate curve, for `use_checkpoint_lr_scheduler`.
        progress: where the job begins.
        text: lines that say so.
    """

    progress: Progress
    text: str
    folder: Path | None = None
    tag: str = ""
    resumes: bool = False
    schedule: dict[str, Any] | None = None

    def load_weights(self, model: GPT) -> None:
        """Into the model, where the weights alone are taken."""
        if self.folder is not None and not self.resumes:
            self.text = "\n".join([self.text, *load_weights(model, self.folder, self.tag)])

    def finish(
        self, engine: deepspeed.DeepSpeedEngine, groups: Groups, layout: dict[str, Any]
    ) -> Progress:
        """The engine's part; every rank must call it."""
        if self.resumes:
            self.progress = checkpoint.restore(engine, groups, self.folder, self.tag, layout=layout)
        elif self.progress.step:
            annealing, step = engine.lr_scheduler, self.progress.step
            curve = self.schedule or annealing.state_dict()
            annealing.load_state_dict(curve | {"num_iters": step})
            engine.global_steps = step
        return self.progress


def choose_start(config: Config, data_identity: dict[str, Any], train_samples: int) -> Start:
    """Look at `load` and decide.

    Args:
        data_identity: what the order of this run's samples depends on.
        train_samples: samples that this run's training index is built for.

    Raises:
        CheckpointError: the checkpoint is damaged or was trained on other data, or there is none
            and there is nothing but a checkpoint to evaluate.
    """
    load, iters = config.checkpoint.load, config.training.train_iters
    fresh = Progress(0, 0, train_samples)
    if not load:
        return Start(fresh, "starting fresh: no `load` in the config")
    folder = Path(load)
    tag = checkpoint.newest(folder)
    if tag is None:
        if iters == 0:
            raise CheckpointError(
                f"{folder} holds no checkpoint (no file `latest`), and train_iters: 0 does nothing "
                "but evaluate one; name the folder that holds `latest`"
            )
        return Start(fresh, f"starting fresh: {folder} holds no checkpoint")
    where = folder / tag
    if config.checkpoint.finetune:
        text = f"starting at step 0 from the weights of {where} (finetune)"
        return Start(fresh, text, folder, tag)
    published = is_published(where)
    record = {} if published else checkpoint.read_record(folder, tag)
    if iters > 0 and not published and "imported" not in record:
        _check_data(where, record["data"], data_identity)
        return Start(fresh, f"resuming from {where}", folder, tag, resumes=True)
    if published:
        step, schedule = counters(where)
    else:
        step = record["progress"]["step"]
        schedule = record.get("imported", {}).get("schedule")
    batch = config.batch.train_batch_size
    progress = Progress(step, step * batch, train_samples)
    text = f"evaluating {where}, trained for {step} steps"
    if iters > 0:
        text = (
            f"going on at step {step} from the weights of {where}, a published checkpoint: the "
            "optimizer's moments start at zero, samples are counted as step x train_batch_size"
        )
    return Start(progress, text, folder, tag, schedule=schedule)


def _check_data(where: Path, recorded: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{key}: {recorded.get(key)!r} in the checkpoint, {value!r} now"
        for key, value in now.items()
        if recorded.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{where} was trained on other data or in another order ({'; '.join(differing)}), so "
            "it cannot be continued exactly. Restore those settings, or set `finetune: true` to "
            "start a new run from its weights"
        )
