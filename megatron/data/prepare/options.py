"""The options of a preparation run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.prepare.chunks import Limits
from megatron.data.prepare.encode import EncodeOptions


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a preparation run.

    Attributes:
        encode: The options for encoding a record.
        workers: The number of worker processes. If it is 1, the main process encodes the text.
        on_error: "stop" to end the run at a faulty record or file, or "skip" to skip and list it.
        partition: (i, n) selects partition i of n. Partitions are numbered from 1.
        checkpoint_seconds: The time between two updates of the journal.
        quiet: Show no progress bar.
        limits: The largest size of a document, and how much an input may expand.
    """

    encode: EncodeOptions = EncodeOptions()
    workers: int = 1
    on_error: str = "stop"
    partition: tuple[int, int] = (1, 1)
    checkpoint_seconds: float = 10.0
    quiet: bool = False
    limits: Limits = Limits()
