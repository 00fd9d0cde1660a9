"""End a process at once, without waiting for its threads, or end all processes of a job."""

import os
import threading
from collections.abc import Callable
from typing import NoReturn

GIVE_BACK: list[Callable[[], None]] = []
"""Functions that release what other processes wait for, such as the lease of a run folder."""
LONGEST = 5.0
"""The most seconds that `end_now` waits for the functions in `GIVE_BACK`."""


END_JOB: list[Callable[..., NoReturn]] = []
"""The function that ends all processes of the job, with the arguments of `end_job_of_this_process`.

`engine.job.failure` enters it.
"""


def end_job_of_this_process(text: str, *, code: int, ends_all: bool = False) -> None:
    """End all processes of this job with an error message. Without a job, do nothing.

    Args:
        text: The error message to print.
        code: The exit code of this process.
        ends_all: Whether the other processes also exit with `code`. If not, their exit code is 1.
    """
    # A job is several processes that a launcher such as torchrun started together.
    if END_JOB and is_member():
        END_JOB[0](text, code=code, ends_all=ends_all)


def is_member() -> bool:
    """Return whether a launcher (such as torchrun) started this process together with others."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def end_now(code: int) -> NoReturn:
    """Call the functions in `GIVE_BACK`, and end this process without waiting for its threads.

    The functions release what other processes wait for, such as the lease (reservation) of a run
    folder. If they take longer than `LONGEST` seconds, this process ends before they return.

    Args:
        code: The exit code.
    """

    def give_back() -> None:
        for function in GIVE_BACK:
            function()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(LONGEST)
    os._exit(code)
