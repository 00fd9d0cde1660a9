"""Download files, verify them, and resume downloads that were interrupted.

The file NAME is downloaded to NAME.part. The version that the server reports (an ETag or a date) is
stored in NAME.part.version. If the server still has this version at a later attempt, only the
missing rest of the file is requested. Otherwise the complete file is requested. When the length and
SHA-256 of NAME.part are verified, NAME.part is renamed to NAME. If `catalogue.py` contains no
SHA-256 for the file, the first download is trusted. Its SHA-256 is stored in .NAME.sha256, and
later downloads must have the same SHA-256.
"""

import os
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from megatron.data.corpora.catalogue import RemoteFile
from megatron.data.errors import CorpusError
from megatron.data.locks import one_at_a_time
from megatron.data.prepare.compression import hash_file
from megatron.data.prepare.progress import progress_bar
from megatron.files import write_text

_BLOCK = 1 << 20
_TIMEOUT = 60.0  # seconds to wait for the next byte
_ATTEMPTS = 5  # attempts in a row without a new byte before an address is given up
_NOTHING_LEFT = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE  # the file ends before the range


class _WrongFile(Exception):
    """A server sent something other than the expected file."""


# `urllib` raises ValueError for headers that it cannot parse, such as a redirection.
_SERVER_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, ValueError, _WrongFile)


def download(
    file: RemoteFile,
    path: Path,
    *,
    mirror: str | None = None,
    force: bool = False,
    advice: str = "",
) -> str:
    """Download `file` to `path`, unless `path` already exists.

    Args:
        file: The file and its addresses, which are tried in order.
        path: The path to write.
        mirror: The address of a folder that contains the file. This address is tried first.
        force: Download the file even if `path` exists.
        advice: A text that is appended to the error message if no address has the file.

    Returns:
        The SHA-256 (hex) of the downloaded file, or "" if nothing was downloaded.

    Raises:
        CorpusError: No address has the file, or `path` cannot be written.
        CorpusError: `force` is false, and `path` exists with the wrong size.
    """
    # If no address has the file, the error message lists the reply from each address.
    with one_at_a_time(path.with_name(f".{path.name}.lock")):
        if path.exists() and not force:
            if file.size is not None and path.stat().st_size != file.size:
                raise CorpusError(
                    f"{path}: has {path.stat().st_size} bytes, {file.size} are expected; remove "
                    "it, or give --force-redownload"
                )
            return ""
        answers = []
        for url in _addresses(file, mirror):
            try:
                return _from_address(url, file, path)
            except (*_SERVER_ERRORS, OSError) as error:
                if not isinstance(error, _SERVER_ERRORS):  # the local disk failed, not the server
                    raise CorpusError(f"{path}: {error}; what was downloaded is kept") from error
                answers.append(f"{url}: {_reason(error)}")
    raise CorpusError(f"{path.name} cannot be downloaded:\n  " + "\n  ".join(answers) + advice)


def check(file: RemoteFile, mirror: str | None = None) -> Iterator[tuple[str, bool, str]]:
    """Send a HEAD request to each address of `file`.

    Args:
        mirror: The address of a folder that contains the file. This address is checked first.

    Yields:
        For each address, (address, whether the server has the file, text). The text contains the
        size of the file or the error.
    """
    for url in _addresses(file, mirror):
        try:
            with _open(url, method="HEAD") as answer:
                length = _length(answer)
        except _SERVER_ERRORS as error:
            yield url, False, _reason(error)
            continue
        if file.size is not None and length not in (None, file.size):
            yield url, False, f"has {length} bytes, {file.size} are expected"
        else:
            yield url, True, f"{length:,} bytes" if length else "reachable"


def _addresses(file: RemoteFile, mirror: str | None) -> list[str]:
    mirrored = [f"{mirror.rstrip('/')}/{file.name}"] if mirror else []
    return [*mirrored, *file.urls]


def _from_address(url: str, file: RemoteFile, path: Path) -> str:
    """Download `file` to `path` from one address.

    Returns:
        The SHA-256 (hex) of the file.

    Raises:
        _WrongFile: The size or SHA-256 of the download is not the expected one.
    """
    part, version = Path(f"{path}.part"), Path(f"{path}.part.version")
    stored = path.with_name(f".{path.name}.sha256")
    known = file.sha256 or (stored.read_text(errors="replace").strip() if stored.exists() else None)
    _complete(url, file, part, version)
    found, size = hash_file(part), _size(part)
    right = file.size in (None, size) and known in (None, found)
    if right:
        os.replace(part, path)
        if known is None:
            write_text(stored, f"{found}\n")
    else:
        part.unlink()
    version.unlink(missing_ok=True)
    if not right:
        expected = (file.size, known)
        way = "" if file.sha256 else f"; if it was replaced on purpose, remove {stored}"
        raise _WrongFile(f"serves another file: {size} bytes, SHA-256 {found}, not {expected}{way}")
    return found


def _complete(url: str, file: RemoteFile, part: Path, version: Path) -> None:
    """Download a file into `part`. If the connection breaks, try again.

    Args:
        url: The address of the file.
        part: The path to which the bytes are written. If `part` exists, the download continues at
            the end of `part`.
        version: The path of a text file that stores the version of `part`, an ETag or a date.
    """
    # Give up after `_ATTEMPTS` attempts in a row without a new byte. Give up at once after an HTTP
    # error status.
    idle = 0
    while True:
        before = _size(part)
        try:
            total = _append(url, file, part, version)
            if total in (None, _size(part)):
                return
            failure = _WrongFile(f"stops after {_size(part)} of {total} bytes")
        except _SERVER_ERRORS as error:
            if isinstance(error, HTTPError):  # the server refused, so do not ask again
                raise
            failure = error
        idle = idle + 1 if _size(part) <= before else 0
        if idle >= _ATTEMPTS:
            raise failure
        time.sleep(min(0.1 * 2**idle, 10.0))


def _append(url: str, file: RemoteFile, part: Path, version: Path) -> int | None:
    """Request the rest of a partly downloaded file, and append it to `part`.

    Args:
        version: The path of a text file that stores the version of `part`, an ETag or a date.

    Returns:
        The length of the complete file, or None if the server does not report the length.

    Raises:
        _WrongFile: The server sends other bytes than requested. `part` is then removed.
    """
    # If the server now has another version of the file, the complete file is downloaded again.
    have = _size(part)
    known = version.read_text() if version.exists() else ""
    headers = {"Range": f"bytes={have}-", "If-Range": known} if have and known else {}
    try:
        answer = _open(url, headers)
    except HTTPError as error:
        if error.code != _NOTHING_LEFT or not headers:
            raise
        if (error.headers.get("Content-Range") or "").endswith(f"/{have}"):
            return have
        part.unlink()  # the part belongs to another version of the file
        return _append(url, file, part, version)
    with answer:
        resumed = answer.status == HTTPStatus.PARTIAL_CONTENT
        total = _length(answer)
        if resumed:
            text = answer.headers.get("Content-Range") or "no Content-Range"
            found = re.fullmatch(rf"bytes {have}-[0-9]+/([0-9]{{1,18}})", text)
            if not headers or not found:
                part.unlink(missing_ok=True)
                raise _WrongFile(f"sends {text!r} instead of the bytes from {have}")
            total = int(found[1])
        version.write_text(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")
        with (
            open(part, "ab" if resumed else "wb") as out,
            progress_bar(total or file.size or 0, file.name) as show,
        ):
            while block := answer.read(_BLOCK):
                out.write(block)
                show(out.tell())
            out.flush()
            os.fsync(out.fileno())
    return total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _length(answer: HTTPResponse) -> int | None:
    """Return the `Content-Length` of an HTTP answer in bytes, or None without such a header.

    Raises:
        _WrongFile: The `Content-Length` is not a number.
    """
    text = answer.headers.get("Content-Length")
    if text is not None and not re.fullmatch("[0-9]{1,18}", text):
        raise _WrongFile(f"sends the Content-Length {text[:40]!r}, which is not a number of bytes")
    return None if text is None else int(text)


def _open(url: str, headers: dict | None = None, method: str = "GET") -> HTTPResponse:
    return urlopen(Request(url, headers=headers or {}, method=method), timeout=_TIMEOUT)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
