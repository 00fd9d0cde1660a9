"""Downloads that go on where they broke off, are verified, and land by a rename.

A file grows as NAME.part beside a note of the version that the server announced (ETag or date); a
later attempt asks for the rest of that version, and starts anew if it has changed. The file gets
its name only when its length and, where known, its SHA-256 are right.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from megatron.data.corpora.catalogue import RemoteFile
from megatron.data.errors import CorpusError
from megatron.data.locks import one_at_a_time
from megatron.data.prepare.compression import hash_file
from megatron.data.prepare.progress import ProgressBar

_BLOCK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte
_ATTEMPTS = 5  # in a row at one address without a new byte
_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class _Wrong(Exception):
    """What an address serves is not the file."""


def download(
    file: RemoteFile, path: Path, *, mirror: str | None = None, force: bool = False
) -> str:
    """Get `file` to `path` unless it is there; return its SHA-256 (empty if it was there).

    Tries `mirror` (the address of a folder) first, then the file's own addresses. CorpusError, with
    what each address answered, if none has it.
    """
    with one_at_a_time(path.with_name(f".{path.name}.lock")):
        if path.exists() and not force:
            if file.size is not None and path.stat().st_size != file.size:
                raise CorpusError(
                    f"{path}: has {path.stat().st_size} bytes, {file.size} are expected; remove "
                    "it, or give --force-redownload"
                )
            return ""
        answers = []
        for url in addresses(file, mirror):
            try:
                return _from_address(url, file, path)
            except _Wrong as error:
                answers.append(f"{url}: {error}")
            except _ERRORS as error:
                answers.append(f"{url}: {_reason(error)}")
            except OSError as error:  # this disk, not that server
                raise CorpusError(f"{path}: {error}; what was downloaded is kept") from error
    raise CorpusError(f"{path.name} cannot be downloaded:\n  " + "\n  ".join(answers))


def addresses(file: RemoteFile, mirror: str | None) -> list[str]:
    own = [f"{mirror.rstrip('/')}/{file.name}"] if mirror else []
    return [*own, *file.urls]


def check(file: RemoteFile, mirror: str | None = None) -> Iterator[tuple[str, bool, str]]:
    """(address, whether it has the file, in words) for each address, by a HEAD request."""
    for url in addresses(file, mirror):
        try:
            with _open(url, method="HEAD") as answer:
                length = answer.headers.get("Content-Length")
        except _ERRORS as error:
            yield url, False, _reason(error)
            continue
        if file.size is not None and length is not None and int(length) != file.size:
            yield url, False, f"has {length} bytes, {file.size} are expected"
        else:
            yield url, True, f"{int(length):,} bytes" if length else "reachable"


def _from_address(url: str, file: RemoteFile, path: Path) -> str:
    part, note = Path(f"{path}.part"), Path(f"{path}.part.version")
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            total = _append(url, file, part, note)
            have = part.stat().st_size
            if total is None or have == total:
                break
            if have > total:
                part.unlink()
                raise _Wrong(f"gave {have} bytes of {total}")
        except urllib.error.HTTPError:
            raise
        except _ERRORS:
            if not part.exists() or part.stat().st_size <= before:
                idle += 1
                if idle >= _ATTEMPTS:
                    raise
        else:
            idle = idle + 1 if have <= before else 0
            if idle >= _ATTEMPTS:
                raise _Wrong(f"stops after {have} of {total} bytes")
        time.sleep(min(0.1 * 2**idle, 10.0))
    found = hash_file(part)
    expected = (file.size, file.sha256)
    if file.size not in (None, part.stat().st_size) or file.sha256 not in (None, found):
        size = part.stat().st_size
        part.unlink()
        note.unlink(missing_ok=True)
        raise _Wrong(f"serves another file: {size} bytes, SHA-256 {found}, not {expected}")
    os.replace(part, path)
    note.unlink(missing_ok=True)
    return found


def _append(url: str, file: RemoteFile, part: Path, note: Path) -> int | None:
    """Append what the server gives to `part`; return the whole file's length if it says so."""
    have = part.stat().st_size if part.exists() else 0
    version = note.read_text() if note.exists() else ""
    headers = {}
    if have and version:
        headers = {"Range": f"bytes={have}-", "If-Range": version}
    try:
        answer = _open(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing is left to send: the file is whole, or the .part is none of its.
        total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if total.isdigit() and int(total) == have:
            return have
        part.unlink()
        return -1 if not total.isdigit() else int(total)
    with answer:
        resumed = answer.status == 206
        length = answer.headers.get("Content-Length")
        start = have if resumed else 0
        note.write_text(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")
        total = start + int(length) if length else None
        with (
            open(part, "ab" if resumed else "wb") as out,
            ProgressBar(total or file.size or 0, file.name, quiet=False) as progress,
        ):
            while block := answer.read(_BLOCK):
                out.write(block)
                progress.show(out.tell(), {"documents": 0, "text_bytes": 0})
            out.flush()
            os.fsync(out.fileno())
    return total


def _open(url: str, headers: dict | None = None, method: str = "GET"):
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    return urllib.request.urlopen(request, timeout=_TIMEOUT)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
