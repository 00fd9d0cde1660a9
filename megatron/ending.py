"""End a process at once, without waiting for its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

GIVE_BACK: list[Callable[[], None]] = []
"""Functions that release what other processes wait for, such as the lease of a run folder."""
LONGEST = 5.0
"""The most seconds that `end_now` waits for the functions in `GIVE_BACK`."""


def end_now(code: int) -> NoReturn:
    """Call the functions in `GIVE_BACK`, then end this process with exit code `code`.

    The functions release what other processes wait for, such as the lease of a run folder. After
    `LONGEST` seconds the process ends even if a function has not returned.
    """

    def give_back() -> None:
        for function in GIVE_BACK:
            function()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(LONGEST)
    os._exit(code)
