"""The journal of a preparation run, a file that lets an interrupted run continue.

The journal PREFIX.journal contains the inputs, tokenizer and options of the run. The run writes its
tokens to .part files, the unfinished shards. Every few seconds, the run stores in the journal the
number of the last chunk in the .part files, and the numbers of documents and tokens in these files.
A resumed run truncates the .part files to these numbers and continues with the next chunk.
Therefore the shards of a resumed run equal the shards of an uninterrupted run.
"""

import glob
import json
import os
import time
import zlib
from dataclasses import dataclass
from typing import Any

from megatron import files
from megatron.data.errors import CorpusError, DataError
from megatron.data.shards.format import shard_path


@dataclass
class State:
    """The progress of a preparation run, as its journal stores it.

    Attributes:
        counts: Maps what is counted, such as "documents", to the total so far.
        facts: For each source, a dict of facts about the source, such as its SHA-256.
        written: The numbers of documents and tokens in each unfinished shard.
        begin: The pair [source, number] of the first chunk written, or None.
        done: The pair [source, number] of the last chunk written, or None.
        skipped_bytes: The number of bytes in the file that lists the skipped records.
        archive: The number of complete files in the `lm_dataformat` archive that the run writes.
    """

    # `counts` has the keys `encode.CHUNK_COUNTS`. The manifests record `facts`.

    counts: dict[str, int]
    facts: list[dict]
    written: list
    begin: list[int] | None = None
    done: list[int] | None = None
    skipped_bytes: int = 0
    archive: int = 0

    @property
    def kept(self) -> list:
        """How much of the unfinished shards and of the unfinished archive a resumed run keeps.

        The entry of a shard contains the number of documents and the number of tokens to keep. The
        last entry contains the number of files of the archive to keep.
        """
        # These are the arguments of the method `rewind`. The writers of the shards come first. The
        # writer of the archive is last.
        return [*self.written, [self.archive]]


class Journal:
    """The file that records how far a preparation run has come, so that a later run can continue.

    Args:
        prefix: The path of the shards without suffix. The journal is the file PREFIX.journal.
        job: A JSON object that identifies the run. Only a run with the same object can continue.
        seconds: The time between two updates of the journal.

    Attributes:
        refused: The reason why the existing journal cannot be used, or None.
    """

    # `refused` is set by `read`.

    def __init__(self, prefix: str | os.PathLike, job: Any, seconds: float) -> None:
        self.path, self._prefix = shard_path(prefix, ".journal"), os.fspath(prefix)
        self.job, self.seconds = json.loads(json.dumps(job)), seconds
        self._last_write = time.monotonic()
        self.refused: str | None = None

    def read(self) -> State | None:
        """Return the state in the journal, or None if there is no valid journal of this job."""
        if not self.path.is_file():
            return None
        try:
            entry = files.parse_json(self.path.read_bytes())
            job, state = entry["job"], entry["state"]
            if entry["checksum"] != _checksum(job, state):
                raise ValueError("its checksum is wrong")
            state = State(**state)
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
        """Whether it is time to write the journal again."""
        return time.monotonic() - self._last_write >= self.seconds

    def write(self, state: State) -> None:
        """Write `state` to the journal, in place of the earlier state."""
        checksum = _checksum(self.job, vars(state))
        entry = {"job": self.job, "state": vars(state), "checksum": checksum}
        files.write_text(self.path, json.dumps(entry))
        self._last_write = time.monotonic()

    def remove(self) -> None:
        """Remove the journal and its temporary files."""
        # An interrupted `write` may have left temporary files.
        self.path.unlink(missing_ok=True)
        for path in self.path.parent.glob(f".{glob.escape(self.path.name)}.*{files.UNFINISHED}"):
            path.unlink()

    def explain(self, error: OSError | DataError) -> DataError:
        """Return a DataError with the text of `error` and the place where a rerun continues."""
        kept = ""
        if state := self.read():
            documents = state.counts["documents"]
            kept = f"the same command goes on after the first {documents:,} documents"
        if isinstance(error, DataError):
            return type(error)(f"{error}, {kept}" if kept else str(error))
        place = "" if error.filename else f"{self._prefix}: "  # a full disk names no file
        return CorpusError(f"{place}{error}; {kept or 'nothing is written'}")


def _checksum(job: Any, state: dict) -> int:
    return zlib.crc32(json.dumps([job, state], sort_keys=True).encode())
