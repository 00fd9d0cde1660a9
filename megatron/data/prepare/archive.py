"""Write the documents of a preparation run as an archive of `lm_dataformat`.

`lm_dataformat` is a Python package, which writes the files. An archive is a folder of files named
`data_N_timeT_NAME.jsonl.zst`. Each line of a file is the record of one document, with its text and
its meta data. A preparation run can read an archive like any other folder of files with JSON lines.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.data.errors import CorpusError, needs_package
from megatron.data.locks import try_lock
from megatron.files import flush

_FIRST = 1_000_000  # the number of the first file; readers sort names, so 10 must not precede 2


class ArchiveWriter(AbstractContextManager["ArchiveWriter"]):
    """A writer of an `lm_dataformat` archive. An incomplete archive never has the final name.

    The writer fills the hidden folder `.NAME.part` beside `folder`, where NAME is the name of
    `folder`. `finalize` renames the hidden folder to `folder`. If the process is killed, the hidden
    folder remains, and a later run can continue the archive.

    Args:
        folder: The folder of the archive.

    Attributes:
        keep_parts: Whether to keep an unfinished archive if the `with` block raises an error.

    Raises:
        CorpusError: `folder` exists and is not an empty folder, or `lm_dataformat` is not
            installed.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        with needs_package("lm_dataformat", "--archive", CorpusError):
            import lm_dataformat
        self.folder, self.keep_parts = Path(folder).resolve(), False
        self._part = self.folder.with_name(f".{self.folder.name}.part")
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise CorpusError(
                f"{folder}: exists already; name another folder as --archive, or remove it"
            )
        self._library = lm_dataformat
        self._archive: Any = None
        self._files = self._added = 0

    def holds(self, files: int) -> bool:
        """Return whether the unfinished archive contains at least `files` complete files."""
        return len(self._complete_files()) >= files

    def rewind(self, files: int) -> None:
        """Keep the first `files` files of the unfinished archive, and continue the archive there.

        The other files, which an earlier run wrote, are removed.

        Raises:
            CorpusError: Another process is writing this archive, or its folder cannot be created.
        """
        with self._explained():
            self._part.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._part, os.O_RDONLY)
            if try_lock(self._lock, wait=False) is False:
                os.close(self._lock)
                raise CorpusError(f"{self.folder}: another process is writing this archive")
            for path in self._complete_files()[files:]:
                path.unlink()
            self._archive = self._library.Archive(str(self._part))
        self._files, self._added = files, 0
        self._archive.i = _FIRST + files

    def add(self, documents: Iterable[tuple[str, Any]]) -> None:
        """Append documents, each a pair (text, meta data)."""
        with self._explained():
            for text, meta in documents:
                self._archive.add_data(text, meta)
                self._added += 1

    def sync(self) -> int:
        """Flush the added documents to disk, and return the number of complete files.

        The current file is completed unless it is empty. Complete files survive a crash of the
        machine.
        """
        if self._added:
            with self._explained():
                self._archive.commit()
                flush(self._complete_files()[-1])
                flush(self._part)
            self._files, self._added = self._files + 1, 0
        return self._files

    def finalize(self) -> None:
        """Complete the archive and give its folder its final name."""
        self.sync()
        self._archive.fh.close()
        with self._explained():
            (self._part / "current_chunk_incomplete").unlink()  # empty: `commit` opened it
            self._part.rename(self.folder)
            flush(self.folder.parent)

    def __exit__(self, *_: object) -> None:
        if self._archive is None:  # before `rewind`, or another process writes this archive
            return
        with suppress(OSError):  # closing flushes the buffer, which fails on a full disk
            self._archive.fh.close()
        if not self.keep_parts:
            shutil.rmtree(self._part, ignore_errors=True)  # there is none after `finalize`
        os.close(self._lock)

    def _complete_files(self) -> list[Path]:
        return sorted(self._part.glob("data_*.jsonl.zst"))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError of the `with` block into a CorpusError that names the archive."""
        try:
            yield
        except OSError as error:
            raise CorpusError(f"{self.folder}: the archive cannot be written: {error}") from error
