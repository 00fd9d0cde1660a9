"""Profile some steps of a run on the main rank: a trace, the costliest operations, and memory.

The config keys are GPT-NeoX's. `profile` and `memory_profiling` turn profiling on, for the steps
`profile_step_start` to `profile_step_stop`. The profile includes the logging and saving between
these steps. The files are written into the run folder after the last of these steps, or at the end
of training if training ends earlier.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.config.sections.data import LoggingConfig
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.hooks import Hook
from megatron.files import replacing, write_text

_ROWS = 30  # of the table


class StepProfiler(Hook):
    """A hook that profiles some training steps.

    Args:
        run_dir: The folder for the files of the profile.
    """

    # The steps are those from `profile_step_start` to `profile_step_stop`. The config's
    # `memory_profiling_path` may name another folder for the memory profile.

    def __init__(self, c: LoggingConfig, run_dir: Path, log: RunLog):
        self._run_dir, self._log, self._step = run_dir, log, 0
        self._first, self._last = max(1, c.profile_step_start), c.profile_step_stop
        self._memory_dir = Path(c.memory_profiling_path or run_dir)
        self._traces, self._records = c.profile and log.is_main, c.memory_profiling and log.is_main
        self._profile: profile | None = None
        self._active = False
        if self._records and not torch.cuda.is_available():
            log.line("memory_profiling: it records a GPU's memory, and there is no GPU")
            self._records = False

    def before_step(self, number: int) -> None:
        """Begin the profile before the first profiled step; end it after the last profiled step."""
        if self._step == 0 and number > self._first and (self._traces or self._records):
            folder = self._run_dir if self._traces else self._memory_dir
            if not any(folder.glob(f"profile_step{self._first}-*")):  # of an earlier start
                self._log.line(
                    f"profile: the run begins at step {number}, after profile_step_start: "
                    f"{self._first}, so nothing is profiled; write {number} or more"
                )
        self._step = number
        if self._step == self._first:
            self._begin()
        elif self._step == self._last + 1:
            self.end()

    def _begin(self) -> None:
        self._active = True
        if self._records:
            torch.cuda.memory._record_memory_history()
        if self._traces:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the profile and write its files. Do nothing if no profile is running."""
        if not self._active:
            return
        self._active = False
        name = f"profile_step{self._first}-{min(self._step, self._last)}"
        if self._profile is not None:
            self._profile.stop()
            trace, table = (self._run_dir / f"{name}{end}" for end in (".json", ".txt"))
            with replacing(trace) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            write_text(table, operations(self._profile) + "\n")
            self._profile = None
            self._log.line(
                f"profile: {trace} (for ui.perfetto.dev); the operations by time: {table}"
            )
        if self._records:
            self._memory_dir.mkdir(parents=True, exist_ok=True)
            path = self._memory_dir / f"{name}_memory.pickle"
            with replacing(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._log.line(f"profile: memory in {path} (for docs.pytorch.org/memory_viz)")


def operations(measured: profile) -> str:
    """Return a table of the operations, sorted by GPU time, or by CPU time if there is no GPU."""
    where = "device" if torch.cuda.is_available() else "cpu"
    return measured.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=_ROWS)
