"""What a long run shows: a bar over the input's bytes, documents and text a second, time left."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class Progress:
    """A bar to `total` bytes of input (0: unknown), on the error stream; `quiet` for none."""

    def __init__(self, total: int, label: str, quiet: bool) -> None:
        # A log file gets a line now and then instead of ten a second.
        seconds = 0.2 if sys.stderr.isatty() else 15.0
        self._bar = tqdm(
            total=total or None, desc=label, unit="B", unit_scale=True, disable=quiet,
            mininterval=seconds, smoothing=0.1,
        )  # fmt: skip
        self._begun: tuple[float, int, int] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if exc_type is None and self._bar.total:
            self._bar.update(self._bar.total - self._bar.n)
        self._bar.close()

    def show(self, read: int, counts: dict[str, int]) -> None:
        """`read` bytes of the input are done, with these counts since the very start."""
        now, documents, text = time.monotonic(), counts["documents"], counts["text_bytes"]
        if self._begun is None:  # a resumed run: what it did not do does not count
            self._begun = (now, documents, text)
            self._bar.initial = max(0, read)
        begun, documents_then, text_then = self._begun
        seconds = max(now - begun, 1e-9)
        if documents > documents_then:
            self._bar.set_postfix_str(
                f"{(documents - documents_then) / seconds:,.0f} documents/s, "
                f"{(text - text_then) / seconds / 1e6:.1f} MB/s of text",
                refresh=False,
            )
        self._bar.update(max(0, min(read, self._bar.total or read) - self._bar.n))
