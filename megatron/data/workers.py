"""A function over a stream of items in worker processes, results in the order of the items.

At most three items a worker are under way, so memory has a bound whatever the length of the
stream. Workers are forked, so they share what the function holds, a vocabulary for one; they must
be started before anything else starts a thread or takes a lock that they would keep (`with` does
that). A worker that dies, for want of memory for one, is an error, never a wait without end; and
workers die with the process that started them, however it ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from .errors import CorpusError

_AHEAD = 3  # items a worker under way
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_function: Callable[[Any], Any] | None = None  # in a worker: what it runs


class Workers:
    """`count` processes that run `function`; with 1, this process does."""

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count = function, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self.count > 1:
            self._pool = ProcessPoolExecutor(
                self.count,
                multiprocessing.get_context("fork"),
                initializer=_start,
                initargs=(self.function, os.getpid()),
            )
            self._pool.submit(os.getpid).result()  # all processes start with the first item
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """`function` of each item, in order. CorpusError if a worker dies."""
        if self._pool is None:
            yield from map(self.function, items)
            return
        under_way: deque = deque()
        try:
            for item in items:
                under_way.append(self._pool.submit(_run, item))
                while under_way and (len(under_way) >= _AHEAD * self.count or under_way[0].done()):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise CorpusError(
                "a worker process died (killed for want of memory?); give fewer --workers, or more "
                "memory"
            ) from None


def _start(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(item: Any) -> Any:
    return _function(item)
