"""Log a run to the console, to `metrics.jsonl` and to Weights & Biases, from the main rank only.

`metrics.jsonl` has one JSON object per line, `{"step": 100, "loss": 1.52, ...}`. Each line is
flushed at once, so that a killed process loses no line that it has logged. JSON has no NaN and no
infinity, so the file contains `null` for both; the console and wandb show them as they are.

A resumed run appends to the file. The file may contain rows of steps after the checkpoint from
which the run resumes, and an incomplete last line. The resumed run first removes both, so that each
step occurs once. A run that starts at step 0 in a used folder renames the old file to
`metrics.jsonl.previous`.

wandb is imported only if the config sets `use_wandb`. The file `wandb_id` beside the metrics
records the id of an online wandb run, and a resumed run continues the wandb run with this id. In
offline mode each start is a new wandb run, because two offline folders with one id overwrite each
other when they are uploaded. `step` is logged as a metric, because a resumed run may go back to an
earlier step, and wandb's internal step counter cannot go back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.engine.errors import RunLogError
from megatron.engine.training.rows import Metric, flat, json_line, plain
from megatron.files import parse_json, write_text

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"
WANDB_OPTIONS = ("project", "team", "group", "host", "mode")
WANDB_MODES = ("online", "offline", "disabled")


class RunLog:
    """The log of one run. Its methods do nothing on ranks other than the main rank.

    Args:
        run_dir: the folder for `metrics.jsonl` and wandb's files, created if it does not exist.
            None writes no `metrics.jsonl` and leaves wandb's files in wandb's default folder.
        is_main: whether this process is the main rank.
        use_wandb: whether metrics also go to wandb.
        wandb_options: any of project, team, group, host, mode (online | offline | disabled), with
            or without the prefix `wandb_`; an option that is None or absent has wandb's default.
        config: the resolved flat configuration, which wandb shows with the run.
        append: whether to continue an existing `metrics.jsonl` and its wandb run.
        last_step: the step from which a run with `append` resumes; rows of later steps are dropped
            from `metrics.jsonl`. With None, rows are only added, because another job may be writing
            the file.
        validates_again: whether the run will compute the validation loss of step `last_step`. If
            so, an earlier row with this loss is dropped.
        confirm: a function to call before each line of metrics is written. It raises an exception
            if another job has taken `run_dir` over.

    Raises:
        ValueError: a wandb option or the wandb mode is unknown.
        RunLogError: wandb could not be started.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        *,
        is_main: bool,
        use_wandb: bool = False,
        wandb_options: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        append: bool = False,
        last_step: int | None = None,
        validates_again: bool = False,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        options = _checked_options(wandb_options or {})
        self.is_main = is_main
        self._path: Path | None = None
        self._unwritten: list[str] = []
        self._wandb = None
        self._confirm = confirm
        if not is_main:
            return
        folder = None if run_dir is None else Path(run_dir)
        # Start wandb first, so that no metrics file has changed if wandb cannot be started.
        if use_wandb:
            self._wandb = _start_wandb(folder, options, dict(config or {}), append)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / METRICS_FILE
            if append and last_step is not None:
                _keep_complete_rows(path, last_step, validates_again)
            elif not append and path.exists():
                os.replace(path, path.with_suffix(".jsonl.previous"))
            path.touch()
            self._path = path
            if path.read_bytes()[-1:] not in (b"", b"\n"):  # of a job killed while it wrote
                self._unwritten = ["\n"]
        if self._wandb is not None:
            self.line(_location(self._wandb))

    def line(self, text: str) -> None:
        """Print one line on stdout. If stdout is a file on a full disk, the line is lost."""
        if not self.is_main:
            return
        try:
            print(text, flush=True)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def metrics(self, step: int, values: Mapping[str, Metric], *, text: str | None = None) -> None:
        """Record values at a step, in `metrics.jsonl` and wandb.

        Args:
            values: maps each metric's name to a number, a 0-d tensor, or a nested list of these.
            text: a line to print on the console; None prints nothing.
        """
        if not self.is_main:
            return
        row = {"step": step} | {name: plain(metric) for name, metric in values.items()}
        if self._path is not None:
            self._append(self._path, json_line(row))
        if self._wandb is not None:
            self._wandb.log(dict(pair for name in row for pair in flat(name, row[name])))
        if text is not None:
            self.line(text)

    def go_back(self, step: int, validates_again: bool) -> None:
        """Remove the rows of steps after `step`, because the run continues from `step`.

        Args:
            validates_again: whether the run will compute the validation loss of `step`. If so, an
                earlier row with this loss is removed, too.
        """
        if self._path is not None:
            again = step if validates_again else None
            self._unwritten = [row for row in self._unwritten if _is_kept(row, step, again)]
            _keep_complete_rows(self._path, step, validates_again)

    def close(self, *, failed: bool = False) -> None:
        """Close `metrics.jsonl` and finish the wandb run. A second call does nothing.

        Args:
            failed: whether wandb marks the run as failed.
        """
        if self._unwritten and self._path is not None and not self._append(self._path):
            self.line(f"{len(self._unwritten)} rows are missing at the end of {self._path}")
        self._path = None
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
            self._wandb = None

    def _append(self, path: Path, row: str = "") -> bool:
        """Append `row` to the file `path`. Return whether `row` was written.

        Rows that an earlier call could not write are written before `row`. If the write fails, the
        file stays as it was, the next call tries to write the same rows, and training continues.
        """
        rows = [*self._unwritten, row] if row else self._unwritten
        try:
            if self._confirm is not None:
                self._confirm()
            with path.open("ab", buffering=0) as file:
                content, end = "".join(rows).encode(), file.tell()
                if file.write(content) != len(content):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._unwritten:
                self.line(f"metrics cannot be written, training goes on: {path}: {error}")
            self._unwritten = rows
            return False
        self._unwritten = []
        return True

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)


def _location(run: Any) -> str:
    """Return a line that tells the user where to find the wandb run."""
    if run.disabled:
        return "wandb: disabled, nothing is recorded"
    if run.offline:
        folder = Path(run.dir).parent
        return f"wandb: offline run {run.id}; upload it later with `wandb sync {folder}`"
    return f"wandb: {run.url}"


def _keep_complete_rows(path: Path, last_step: int, validates_again: bool) -> None:
    """Remove the rows of the file `path` that are incomplete or that a resumed run writes again.

    A resumed run writes these rows again: those of steps after `last_step`, those of final results
    and, with `validates_again`, the validation loss of `last_step`. The file is replaced
    atomically.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    again = last_step if validates_again else None
    kept = [text for text in lines if _is_kept(text, last_step, again)]
    if kept == lines:
        return
    write_text(path, "".join(kept))


def _is_kept(text: str, last_step: int, validated_again: int | None) -> bool:
    if not text.endswith("\n") or "\ufffd" in text:  # the replacement of damaged bytes
        return False
    try:
        row = parse_json(text)
        step = row["step"]
    except (ValueError, KeyError, TypeError):
        return False
    if type(step) is not int:
        return False
    if any(name.startswith("final/") for name in row):  # a resumed run measures these again
        return False
    if step == validated_again and any(name.startswith("validation/") for name in row):
        return False
    return step <= last_step


def _checked_options(wandb_options: Mapping[str, Any]) -> dict[str, Any]:
    options = {key.removeprefix("wandb_"): value for key, value in wandb_options.items()}
    unknown = sorted(set(options) - set(WANDB_OPTIONS))
    if unknown:
        known = ", ".join(WANDB_OPTIONS)
        raise ValueError(f"unknown wandb option {', '.join(unknown)}; known: {known}")
    mode = options.get("mode")
    if mode is not None and mode not in WANDB_MODES:
        raise ValueError(f"wandb_mode: {mode!r} is not one of {', '.join(WANDB_MODES)}")
    return options


def _start_wandb(
    folder: Path | None, options: dict[str, Any], config: dict[str, Any], append: bool
) -> Any:
    """Start and return a wandb run; with `append`, continue the online run recorded in `folder`."""
    import wandb

    settings = {"silent": True, "console": "off"}
    if options.get("host") is not None:
        settings["base_url"] = options["host"]
    mode: Any = options.get("mode") or os.environ.get("WANDB_MODE", "online")
    run_id = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / WANDB_ID_FILE
        if append and mode == "online" and id_file.exists():
            run_id = id_file.read_text(encoding="utf-8").strip() or None
    try:
        run = wandb.init(
            project=options.get("project"),
            entity=options.get("team"),
            group=options.get("group"),
            mode=mode,
            dir=folder,
            id=run_id,
            resume=None if run_id is None else "allow",
            config=config,
            settings=wandb.Settings(**settings),
        )
    except wandb.Error as error:
        raise RunLogError(
            f"Weights & Biases could not be started: {error}\n"
            "Log in (`wandb login`, or set WANDB_API_KEY), or write `wandb_mode: offline` to "
            "record on disk and upload later with `wandb sync`, or `use_wandb: false`."
        ) from error
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    if folder is not None and mode == "online":
        write_text(id_file, run.id + "\n")
    return run
