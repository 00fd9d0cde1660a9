"""Send a run's metrics and pictures to TensorBoard and to Weights & Biases.

The packages wandb and tensorboard are imported only if the config selects them. Only the main rank
sends metrics.

wandb: the file `wandb_id` beside the metrics records the id of an online wandb run. A resumed run
continues the wandb run with this id. In offline mode, each start is a new wandb run: if two offline
folders had the same id, the second upload would overwrite the first. `step` is logged as a metric.
A resumed run may go back to an earlier step, but wandb's internal step counter cannot go back. The
metrics have GPT-NeoX's names. Results after training are shown in the run's summary, not in charts.

TensorBoard: charts are sorted by name, so the names begin with the numbers of `ORDER`. Each start
of a run writes one more event file into the same folder. The first event of the new file has a
`purge_step`: TensorBoard hides the events of this step and of later steps in the older files. So
each step occurs once.

wandb and TensorBoard show the loss first.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.config.sections.data import LoggingConfig
from megatron.engine.errors import RunLogError
from megatron.engine.run_log.rows import flat
from megatron.files import existing, read_start, why_unwritable, write_text
from megatron.run_folder import TIMES, RunFolder

Row = Mapping[str, Any]
"""The type of a row of metrics: `step`, and the value (a number or nested list) of each metric."""
# The start of a metric's name, and that of its chart in TensorBoard. The first match counts.
ORDER = {
    "train/loss_scale": "3_train/loss_scale", "train/loss": "1_loss/train",
    "validation/loss": "1_loss/validation", "validation/": "2_validation/", "train/": "3_train/",
    "theta/": "4_theta/", "final/": "9_final/", "": "5_",
}  # fmt: skip
# The names that GPT-NeoX logs to wandb (`megatron/logging.py` of its repository).
FLOPS = "runtime/flops_per_sec_per_gpu"  # in FLOP/s, and in TFLOP/s in all other places
NEOX = {
    "train/loss": "train/lm_loss", "validation/loss": "validation/lm_loss",
    "train/lr": "train/learning_rate", "validation/perplexity": "validation/lm_loss_ppl",
    "train/samples_per_second": "runtime/samples_per_sec",
    "train/seconds_per_step": "runtime/iteration_time", "train/tflops_per_device": FLOPS,
}  # fmt: skip


class TensorBoard:
    """TensorBoard's event files in one folder. Call `restart` before any other method.

    Args:
        folder: The folder of the run's event files, created if it does not exist.
        texts: Texts that describe the run, in Markdown, by the name of each text.

    Raises:
        RunLogError: The package tensorboard is not installed, or `folder` cannot be written.
    """

    def __init__(self, folder: Path, texts: Mapping[str, str]):
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise RunLogError(
                f"tensorboard_dir: {folder} needs the package tensorboard ({error}); install it "
                "with `pip install tensorboard==2.21.0`, or leave the key out"
            ) from error
        if why := why_unwritable(existing(folder)):  # now, before the run changes its other files
            text = "write another folder, or leave the key out"
            raise RunLogError(f"tensorboard_dir: {folder} {why}; {text}")
        self._create, self._texts = SummaryWriter, texts
        self._folder = folder
        self._writer: Any = None
        self.about = (
            f"tensorboard: {folder}; look at it with `tensorboard --logdir {folder.parent}`"
        )

    def restart(self, purge_step: int | None, rows: Iterable[Row]) -> None:
        """Hide all events of `purge_step` and later steps, and write `rows` again.

        Args:
            purge_step: The first step whose events are hidden; None hides nothing.
        """
        self.close()
        self._writer = self._create(str(self._folder), purge_step=purge_step)
        for name, text in self._texts.items():
            self._writer.add_text(name, text, purge_step)
        for row in rows:
            self.log(row)

    def log(self, row: Row) -> None:
        for name in row.keys() - {"step", *TIMES}:
            start = next(start for start in ORDER if name.startswith(start))
            for tag, number in flat(name, row[name]):
                if isinstance(number, int | float):  # not None, which stands for NaN and infinity
                    tag = ORDER[start] + tag.removeprefix(start)
                    self._writer.add_scalar(tag, number, row["step"])
        self._writer.flush()

    def picture(self, step: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            pixels_HWC = np.asarray(image.convert("RGB"))
        self._writer.add_image(f"pictures/{path.stem}", pixels_HWC, step, dataformats="HWC")
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


FINISH_SECONDS = 120
"""How long the end of a run waits for wandb's server. `wandb sync` can upload the rest later."""


class Wandb:
    """A run of Weights & Biases.

    Args:
        folder: The folder for wandb's files; None is wandb's default folder.
        settings: The config section with `wandb_project`, `wandb_team` and so on.
        config: The resolved flat configuration, which wandb shows with the run.
        card: A description of the run in words, which wandb shows as the run's notes.
        append: Whether to continue the online run that `folder` records.

    Raises:
        RunLogError: Weights & Biases could not be started.
    """

    # For a key without a value, wandb's default is used. The file `wandb_id` in `folder` records
    # the run.

    def __init__(
        self, folder: Path | None, settings: LoggingConfig, config: Row, card: str, append: bool
    ):
        import wandb

        options: dict[str, Any] = {"silent": True, "console": "off"}
        known = "finish_timeout" in wandb.Settings.model_fields  # not in wandb 0.24
        if known and "WANDB_FINISH_TIMEOUT" not in os.environ:
            options["finish_timeout"] = FINISH_SECONDS
        if settings.wandb_host is not None:
            options["base_url"] = settings.wandb_host
        mode: Any = settings.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        run_id = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            id_file = RunFolder(folder).wandb_id
            if append and mode == "online" and id_file.exists():
                run_id = read_start(id_file).strip() or None
        try:
            self._run = wandb.init(
                project=settings.wandb_project, entity=settings.wandb_team,
                group=settings.wandb_group, mode=mode, dir=folder, id=run_id,
                resume=None if run_id is None else "allow", config=dict(config), notes=card,
                settings=wandb.Settings(**options),
            )  # fmt: skip
        except (wandb.Error, ValueError) as error:  # such as a host that is no URL
            raise RunLogError(
                f"Weights & Biases could not be started: {error}\n"
                "Log in (`wandb login`, or set WANDB_API_KEY), or write `wandb_mode: offline` to "
                "record on disk and upload later with `wandb sync`, or `use_wandb: false`."
            ) from error
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if folder is not None and mode == "online":
            write_text(id_file, self._run.id + "\n")
        self.about = _location(self._run)

    def restart(self, purge_step: int | None, rows: Iterable[Row]) -> None:
        """Do nothing: wandb gets `step` as a metric, and a metric may go back to a lower value."""

    def log(self, row: Row) -> None:
        found = dict(pair for name in row for pair in flat(NEOX.get(name, name), row[name]))
        if FLOPS in found:
            found[FLOPS] *= 1e12
        final = {name: found.pop(name) for name in [*found] if name.startswith("final/")}
        self._run.summary.update(final)
        if found.keys() > {"step"}:
            self._run.log(found)

    def picture(self, step: int, path: Path) -> None:
        import wandb

        self._run.log({"step": step, f"pictures/{path.stem}": wandb.Image(str(path))})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def _location(run: Any) -> str:
    """Return a line that tells the user where to find the wandb run."""
    if run.disabled:
        return "wandb: disabled, nothing is recorded"
    if run.offline:
        folder = Path(run.dir).parent
        return f"wandb: offline run {run.id}; upload it later with `wandb sync {folder}`"
    return f"wandb: {run.url}"
