"""What all fuzzers share: damaged copies of good files, and a limit on the time of one input."""

from __future__ import annotations

import signal
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
FOLDER = Path(_FOLDER.name)
"""Where the fuzzers write their files; removed when the process ends."""
_SECONDS = 20
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
PIECES = [
    *(b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"{", b"[[", b'"', b"\\u", b"-", b"e999"),
    *(b"null", b"1" * 5000, b"[" * 1100, b"\0" * 600, b": {a: &b [*b, *b]}\n", b"!!python/name:x "),
    *(struct.pack(f"{order}Q", n) for n in NUMBERS for order in "<>"),
    *(struct.pack("<I", n % 2**32) for n in NUMBERS),
    *(struct.pack("<H", n % 2**16) for n in NUMBERS),
]
"""What numbers, lengths and texts go wrong with."""

_PLACE = st.integers(0, 1 << 20)
_CHANGES = st.one_of(
    st.tuples(st.just("flip"), _PLACE, st.integers(1, 255)),
    st.tuples(st.just("put"), _PLACE, st.sampled_from(PIECES)),
    st.tuples(st.just("insert"), _PLACE, st.sampled_from(PIECES) | st.binary(max_size=8)),
    st.tuples(st.just("drop"), _PLACE, st.integers(1, 600)),
    st.tuples(st.just("repeat"), _PLACE, st.integers(1, 600)),
    st.tuples(st.just("cut"), _PLACE, st.just(0)),
)


def _changed(content: bytes, change: tuple[str, int, int | bytes]) -> bytes:
    kind, place, what = change
    at = place % (len(content) + 1)
    before, after = content[:at], content[at:]
    match kind, what:
        case "flip", int():
            return before + bytes(byte ^ what for byte in after[:1]) + after[1:]
        case "put", bytes():
            return before + what + after[len(what) :]
        case "insert", bytes():
            return before + what + after
        case "drop", int():
            return before + after[what:]
        case "repeat", int():
            return before + after[:what] + after
        case _:
            return before


@st.composite
def damaged(draw: st.DrawFn, contents: Sequence[bytes], most: int = 4) -> bytes:
    """One of `contents` with up to `most` changes, or with none."""
    content = draw(st.sampled_from(contents))
    for change in draw(st.lists(_CHANGES, max_size=most)):
        content = _changed(content, change)
    return content


class Hang(BaseException):
    """An input took more than its share of processor time."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `Hang` if the block takes more than `_SECONDS` of the processor.

    Processor time, because the machine may be busy.
    """

    def hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def written(name: str, content: bytes) -> Path:
    """Write `content` as file `name` and return its path."""
    path = FOLDER / name
    path.write_bytes(content)
    return path
