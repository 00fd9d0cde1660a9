"""The journal of a run that prepares data: how far it is, so that a killed one goes on from there.

PREFIX.journal says what the run is (its inputs, tokenizer and options) and, every few seconds,
replaced by a rename: the last chunk written, and how many documents and tokens the .part files
then held. Whatever lies beyond is dropped when the run goes on, and the next chunk follows, so the
shards are the bytes of an unbroken run.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.data.shards.format import shard_path


class Journal:
    """`job`: JSON values that must be equal for a run to go on where another stopped."""

    def __init__(self, prefix: str | os.PathLike, job: Any, seconds: float) -> None:
        self.path = shard_path(prefix, ".journal")
        self._part = Path(f"{self.path}.part")
        self.job, self.seconds = json.loads(json.dumps(job)), seconds
        self._last = time.monotonic()
        self.refused: str | None = None  # why `read` found none, where there is a journal

    def read(self) -> dict | None:
        """The state of an interrupted run of the same job, or None."""
        try:
            entry = json.loads(self.path.read_text(encoding="utf-8"))
            job, state = entry["job"], entry["state"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            self.refused = f"is not a journal ({error!r})"
            return None
        if job == self.job:
            return state
        other = [key for key in self.job if job.get(key) != self.job[key]]
        self.refused = f"is of a run with other {' and '.join(other)}"
        return None

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def write(self, state: dict) -> None:
        text = json.dumps({"job": self.job, "state": state})
        self._part.write_text(text, encoding="utf-8")
        os.replace(self._part, self.path)
        self._last = time.monotonic()

    def remove(self) -> None:
        for path in (self.path, self._part):
            with suppress(FileNotFoundError):
                path.unlink()
