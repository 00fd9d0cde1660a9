"""The log of a run: console, `metrics.jsonl` and Weights & Biases, from the main rank only.

`metrics.jsonl` has one JSON object per line, `{"step": 100, "loss": 1.52, ...}`. Each line is
flushed at once, so that a killed process loses no line that it has printed. JSON has no NaN and no
infinity: the file shows them as `null`, the console and wandb as they are.

A resumed run continues the file. The killed run may have left rows beyond the checkpoint that the
new run starts from, and a torn last line. Both are dropped (`last_step`), so that the file has each
step once. A run that starts at step 0 in a used folder moves the old file to
`metrics.jsonl.previous`.

wandb is imported only if the config asks for it. The id of an online run is kept in `wandb_id`
beside the metrics, and a resumed run continues that run. Offline, wandb cannot resume: two offline
folders with one id overwrite each other when they are uploaded. There, each start is a new wandb
run. `step` is logged as a metric, because wandb's internal counter cannot go back, as a resumed run
does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.engine.errors import RunLogError
from megatron.files import write_text

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"
WANDB_OPTIONS = ("project", "team", "group", "host", "mode")
WANDB_MODES = ("online", "offline", "disabled")


class RunLog:
    """The log of one run. Its methods do nothing on ranks other than the main one.

    Args:
        run_dir: folder for `metrics.jsonl` and wandb's files, created if it does not exist; None
            logs on the console only (and to wandb, in wandb's default folder).
        is_main: whether this process is the main rank.
        use_wandb: whether metrics also go to wandb.
        wandb_options: any of project, team, group, host, mode (online | offline | disabled), with
            or without the prefix `wandb_`; None or absent takes wandb's default.
        config: the resolved flat configuration, which wandb shows with the run.
        append: True for a resumed run: continue `metrics.jsonl` and the wandb run.
        last_step: with `append`, the step resumed from; later rows are dropped. None keeps all.

    Raises:
        ValueError: an unknown wandb option or mode.
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
    ) -> None:
        options = _checked_options(wandb_options or {})
        self.is_main = is_main
        self._file = None
        self._wandb = None
        if not is_main:
            return
        folder = None if run_dir is None else Path(run_dir)
        # wandb first: when it cannot start, no metrics file has been touched yet.
        if use_wandb:
            self._wandb = _start_wandb(folder, options, dict(config or {}), append)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / METRICS_FILE
            if append:
                _keep_complete_rows(path, last_step)
            elif path.exists():
                os.replace(path, path.with_suffix(".jsonl.previous"))
            self._file = path.open("a", encoding="utf-8")
        if self._wandb is not None:
            self.line(_location(self._wandb))

    def line(self, text: str) -> None:
        """Print one line on the console."""
        if self.is_main:
            print(text, flush=True)

    def metrics(self, step: int, values: Mapping[str, float], *, text: str | None = None) -> None:
        """Record `values` (plain numbers or 0-d tensors) at `step`; print `text` if given."""
        if not self.is_main:
            return
        row = {"step": step} | {name: _number(value) for name, value in values.items()}
        if self._file is not None:
            self._file.write(_json_line(row))
            self._file.flush()
        if self._wandb is not None:
            self._wandb.log(row)
        if text is not None:
            self.line(text)

    def close(self, *, failed: bool = False) -> None:
        """Close the file and finish the wandb run; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
            self._wandb = None

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
    """A line that shows where to find a wandb run; wandb's own output is off."""
    if run.disabled:
        return "wandb: disabled, nothing is recorded"
    if run.offline:
        folder = Path(run.dir).parent
        return f"wandb: offline run {run.id}; upload it later with `wandb sync {folder}`"
    return f"wandb: {run.url}"


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)


def _json_line(row: Mapping[str, int | float]) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _keep_complete_rows(path: Path, last_step: int | None) -> None:
    """Drop from `path` a torn last line and every row later than `last_step`, atomically."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [text for text in lines if _is_kept(text, last_step)]
    if kept == lines:
        return
    write_text(path, "".join(kept))


def _is_kept(text: str, last_step: int | None) -> bool:
    if not text.endswith("\n"):
        return False
    try:
        row = json.loads(text)
        step = row["step"]
    except (ValueError, KeyError, TypeError):
        return False
    if any(name.startswith("final/") for name in row):  # measured again whenever a run ends
        return False
    return last_step is None or step <= last_step


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
    """Start the wandb run, or with `append` continue the one recorded in `folder`."""
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
