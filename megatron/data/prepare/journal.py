"""The journal of a preparation run: how far it is, so that a killed run can go on from there.

PREFIX.journal identifies the run (inputs, tokenizer and options) and, updated every few seconds,
names the last chunk written and the numbers of documents and tokens that the .part files then held.
A resumed run drops what lies beyond and continues with the next chunk, so the shards are the bytes
of an uninterrupted run.
"""

from __future__ import annotations

import glob
import json
import os
import time
from typing import Any

from megatron import files
from megatron.data.shards.format import shard_path


class Journal:
    """`job`: JSON values that must be equal for a run to continue an interrupted one.

    `refused`: why `read` did not use an existing journal, or None.
    """

    def __init__(self, prefix: str | os.PathLike, job: Any, seconds: float) -> None:
        self.path = shard_path(prefix, ".journal")
        self.job, self.seconds = json.loads(json.dumps(job)), seconds
        self._last_write = time.monotonic()
        self.refused: str | None = None

    def read(self) -> dict | None:
        """The state of an interrupted run of the same job, or None."""
        if not self.exists:
            return None
        try:
            entry = json.loads(self.path.read_text(encoding="utf-8"))
            job, state = entry["job"], entry["state"]
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
        """Whether `seconds` have passed since the last write."""
        return time.monotonic() - self._last_write >= self.seconds

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def write(self, state: dict) -> None:
        files.write_text(self.path, json.dumps({"job": self.job, "state": state}))
        self._last_write = time.monotonic()

    def remove(self) -> None:
        """Remove the journal, and what a killed `write` may have left."""
        self.path.unlink(missing_ok=True)
        for path in self.path.parent.glob(f".{glob.escape(self.path.name)}.*{files.UNFINISHED}"):
            path.unlink()
