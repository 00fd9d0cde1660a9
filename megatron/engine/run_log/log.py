"""Log a run to the console, to files, TensorBoard and wandb, from the main rank only.

`log.txt` contains all lines of the console, from all starts of the run. Each line of `log.txt`
begins with the time. Lines on stdout begin with the time only if stdout is a file.

`metrics.jsonl` has one JSON object per line: `{"step": 100, "time": "2026-11-24T06:01:37+00:00",
"elapsed_seconds": 61.2, "loss": 1.52, ...}`. The seconds count from the start of this job. Each
line is flushed at once, so that a killed process loses no line that it has logged. JSON has no NaN
and no infinity, so the file contains `null` for both. The console and the sinks (TensorBoard and
wandb, see `sinks`) show NaN and infinity.

A resumed run appends to `metrics.jsonl`. Before that, the run removes an incomplete last line, and
the rows of steps after the checkpoint from which the run resumes. So each step occurs once. A run
that starts at step 0 in a used folder renames the old file to `metrics.jsonl.previous`.

On a terminal, a progress line below the other lines is rewritten after each step.
"""

import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.config.sections.data import LoggingConfig
from megatron.engine.run_log.rows import Metric, is_kept, json_line, keep_complete_rows, plain
from megatron.engine.run_log.sinks import TensorBoard, Wandb
from megatron.files import read_small, without_waiting
from megatron.readable_numbers import now
from megatron.run_folder import MOST_BYTES, TIMES, RunFolder

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SINKS = LoggingConfig()


class RunLog(AbstractContextManager):
    """The log of one run. Its methods do nothing on ranks other than the main rank.

    Args:
        run_dir: The folder for `log.txt`, `metrics.jsonl` and wandb's files, created if it does not
            exist. None writes no log files.
        settings: The config section that turns wandb and TensorBoard on.
        is_main: Whether this process is the main rank.
        config: The resolved flat configuration, which TensorBoard and wandb show with the run.
        card: A description of the run in words, which TensorBoard and wandb show with the run.
        append: Whether to continue an existing `metrics.jsonl` and its wandb run.
        last_step: The step from which a run with `append` resumes. Rows of later steps are removed
            from `metrics.jsonl`. None removes no rows.
        confirm: A function to call before each line of metrics is written. It raises an exception
            if another job has taken `run_dir` over.

    Raises:
        RunLogError: Weights & Biases could not be started, or TensorBoard is missing or cannot
            write its files.
    """

    # Without `run_dir`, wandb's files are in wandb's default folder. TensorBoard's event files are
    # in a subfolder of `tensorboard_dir` with the name of `run_dir`. With `last_step` None, another
    # job may be writing `metrics.jsonl`.

    def __init__(
        self,
        run_dir: Path | None,
        settings: LoggingConfig = NO_SINKS,
        *,
        is_main: bool,
        config: Mapping[str, Any] | None = None,
        card: str = "",
        append: bool = False,
        last_step: int | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        self.is_main = is_main
        self._path: Path | None = None
        self._text: Path | None = None
        self._begin = time.monotonic()
        self._unwritten: list[str] = []
        self._sinks: list[TensorBoard | Wandb] = []
        self._bar: tqdm | None = None
        self._confirm = confirm
        if not is_main:
            return
        # Start the sinks first, so that no metrics file has changed if one cannot be started.
        if settings.tensorboard_dir and run_dir is not None:
            lines = [f"    {key}: {value}" for key, value in (config or {}).items()]
            board = Path(settings.tensorboard_dir) / run_dir.resolve().name
            texts = {"card": card.replace("\n", "\n\n"), "config": "\n".join(lines)}
            self._sinks.append(TensorBoard(board, texts))
        if settings.use_wandb:
            self._sinks.append(Wandb(run_dir, settings, config or {}, card, append))
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            path, self._text = RunFolder(run_dir).metrics, RunFolder(run_dir).log
            if append and last_step is not None:
                keep_complete_rows(path, last_step)
            elif not append and path.exists():
                os.replace(path, path.with_suffix(".jsonl.previous"))
            path.touch()
            self._path = path
            if read_small(path, MOST_BYTES)[-1:] not in (b"", b"\n"):  # of a killed job
                self._unwritten = ["\n"]
        self._restart(last_step if append else 0)
        for sink in self._sinks:
            self.line(sink.about)

    def line(self, text: str, *shorter: str) -> None:
        """Print one line on stdout and append it to `log.txt`.

        If `text` is too wide for the terminal, the terminal shows the first text of `shorter` that
        fits. If none fits, the terminal shows the last text of `shorter`. If a disk is full, the
        files on this disk lack the line, and no error is raised. If stdout is redirected to
        `log.txt`, the line is written only once.
        """
        # Stdout is redirected to `log.txt` in a cell of a sweep.
        if not self.is_main:
            return
        timed, file = f"{now()} {text}", _file_of(sys.stdout)
        if shorter and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            text = next((each for each in (text, *shorter) if len(each) <= width), shorter[-1])
        if self._bar is not None:
            self._bar.clear()
        try:
            print(timed if file else text, flush=True)
        except OSError as error:
            if error.errno not in FULL:
                raise
        if self._bar is not None:
            self._bar.refresh()
        if self._text is not None:
            with suppress(OSError), open(self._text, "ab", opener=without_waiting) as kept:
                if not (file and os.path.samestat(file, os.fstat(kept.fileno()))):
                    kept.write(f"{timed}\n".encode())

    def progress(self, step: int, steps: int, text: str) -> None:
        """Rewrite the progress line, which shows `step`, `steps` and `text`.

        Nothing is printed if stdout is not a terminal.

        Args:
            steps: The number of steps of the run.
            text: A text about the training, such as the loss.
        """
        if not self.is_main or not sys.stdout.isatty():
            return
        if self._bar is None:
            form = "step {n_fmt}/{total_fmt} |{bar}| {desc}"
            self._bar = tqdm(
                total=steps, initial=step, file=sys.stdout, bar_format=form, leave=False,
                dynamic_ncols=True,
            )  # fmt: skip
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def metrics(self, step: int, values: Mapping[str, Metric], *texts: str) -> None:
        """Record the metrics of a step in `metrics.jsonl`, TensorBoard and wandb.

        Args:
            values: Maps each metric's name to a number, a 0-d tensor, or a nested list of these.
            texts: A line to print on the console, then shorter lines for narrow terminals. Without
                texts, nothing is printed.
        """
        if not self.is_main:
            return
        row = {"step": step} | {name: plain(metric) for name, metric in values.items()}
        if self._path is not None:
            times = dict(zip(TIMES, (now(), round(time.monotonic() - self._begin, 3)), strict=True))
            self._append(self._path, json_line({"step": step} | times | row))
        self._send("log", row)
        if texts:
            self.line(*texts)

    def pictures(self, step: int, files: Iterable[Path]) -> None:
        """Show PNG files in TensorBoard and wandb, as pictures of step `step`."""
        for path in sorted(files) if self._sinks else ():
            self._send("picture", step, path)

    def _send(self, method: str, *arguments: Any) -> None:
        """Call the method `method` of TensorBoard and of wandb, if they are in use."""
        # A sink that cannot write its files is not used any more.
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*arguments)
            except OSError as error:
                self._sinks.remove(sink)
                self.line(f"{sink.about}: not written any more, training goes on: {error}")

    def _restart(self, step: int | None) -> None:
        """Hide TensorBoard's events from `step` on, and send it the rows of `step` again.

        The rows are those in `metrics.jsonl`. If `step` is None, the run is new, and nothing is
        hidden or sent.
        """
        written = RunFolder(self._path.parent).metrics_rows() if self._path and self._sinks else ()
        rows = [row for row in written if row["step"] == step]
        for sink in self._sinks:
            sink.restart(step, rows)

    def go_back(self, step: int, *, validates_again: bool = False) -> None:
        """Remove the rows of steps after `step` from `metrics.jsonl`, and continue from `step`.

        TensorBoard hides its metrics of these steps. wandb keeps them.

        Args:
            validates_again: Whether to remove the row with the validation loss of `step`, too.
        """
        # With `validates_again`, the run is about to compute this loss again.
        if self._path is not None:
            again = step if validates_again else None
            self._unwritten = [row for row in self._unwritten if is_kept(row, step, again)]
            keep_complete_rows(self._path, step, again)
        self._restart(step)

    def close(self, *, failed: bool = False) -> None:
        """Close `metrics.jsonl`, TensorBoard and wandb. A second call does nothing.

        Args:
            failed: Whether wandb marks the run as failed.
        """
        if self._path is not None and not self._append(self._path) and self._unwritten:
            self.line(f"{len(self._unwritten)} rows are missing at the end of {self._path}")
        self._path = None
        self._send("close", failed)
        self._sinks = []
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _append(self, path: Path, row: str = "") -> bool:
        """Append `row` to a file, and return whether the write succeeded.

        If `row` is "", flush the file to disk. If a write fails, the next call first writes the
        rows of the failed write.
        """
        rows = [*self._unwritten, row] if row else self._unwritten
        try:
            if rows and self._confirm is not None:
                self._confirm()
            with path.open("ab", buffering=0) as file:
                content, end = "".join(rows).encode(), file.tell()
                if file.write(content) != len(content):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if not row:
                    os.fsync(file.fileno())
        except OSError as error:
            if not self._unwritten:
                self.line(f"metrics cannot be written, training goes on: {path}: {error}")
            self._unwritten = rows
            return False
        self._unwritten = []
        return True

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close(failed=kind is not None)


def _file_of(stream: Any) -> os.stat_result | None:
    """Return the status of the regular file that `stream` writes to; None without such a file."""
    try:
        found = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # no stdout, or one without a descriptor
        return None
    return found if stat.S_ISREG(found.st_mode) else None
