"""Apply a function to a stream of items in worker processes; results keep the order of the items.

At most three items per worker are in progress, so memory is bounded for a stream of any length.
Workers are forked, so they share what the function holds, such as a vocabulary. Start them (`with`
does) before anything starts a thread or takes a lock, which a fork would copy.

Each worker has two pipes, one for items and one for results, whose far ends are open in that worker
alone. So the death of a worker at any moment closes its pipes: the next read or write there fails
with a CorpusError and never waits forever. (A queue shared by workers has a lock and a pipe that a
dead worker can leave locked or half written.) Workers die with the process that started them.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megatron.data.errors import CorpusError

_AHEAD = 2  # items sent to a worker and not yet answered: the current one and the next
_IN_PROGRESS = 3  # items per worker that are sent, with results not yet yielded
_PIPE_BYTES = 1 << 20  # holds a chunk of text, or its tokens
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_END = object()

_Answer = tuple[bool, Any]  # (True, result), or (False, the error that the function raised)


class Workers:
    """`count` processes that run `function`; with 1, it runs in this process."""

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count = function, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        if self.count > 1:
            # This process answers Ctrl-C, once the workers ignore it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # Otherwise their garbage collectors write to shared pages, which copies the pages.
            gc.freeze()
            try:
                for _ in range(self.count):
                    self._workers.append(_Worker(self.function, self._workers))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # unfinished work is not needed any more
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()
        self._workers = []
        gc.unfreeze()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `function` of each item, in order. Use it once.

        Raises:
            CorpusError: if a worker dies.
            Exception: the error that `function` raised, in the place of its result.
        """
        if not self._workers:  # one process
            yield from map(self.function, items)
            return
        items, more = iter(items), True
        answers: dict[int, _Answer] = {}  # by the item's number, until they are yielded
        yielded = sent = 0
        while more or yielded < sent:
            idlest = min(self._workers, key=lambda worker: len(worker.numbers))
            room = len(idlest.numbers) < _AHEAD and sent - yielded < _IN_PROGRESS * self.count
            if more and room:
                item = next(items, _END)
                more = item is not _END
                if more:
                    idlest.send(sent, item)
                    sent += 1
            self._collect(answers, wait_for_one=not (more and room) and yielded < sent)
            while yielded in answers:
                succeeded, value = answers.pop(yielded)
                if not succeeded:
                    raise value
                yield value
                yielded += 1

    def _collect(self, answers: dict[int, _Answer], wait_for_one: bool) -> None:
        """Move the answers that have arrived into `answers`."""
        ready = wait([worker.answers for worker in self._workers], None if wait_for_one else 0)
        for worker in self._workers:
            if worker.answers in ready:
                number, answer = worker.receive()
                answers[number] = answer


class _Worker:
    """One process and its two pipes; `numbers`: its unanswered items, oldest first."""

    def __init__(self, function: Callable[[Any], Any], others: list[_Worker]) -> None:
        context = multiprocessing.get_context("fork")
        items_far_end, self._items = context.Pipe(duplex=False)
        self.answers, answers_far_end = context.Pipe(duplex=False)
        for pipe in (self._items, answers_far_end):
            with suppress(OSError):  # the user's limit is reached; a small pipe is only slower
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.numbers: deque[int] = deque()
        args = (function, items_far_end, answers_far_end, [self, *others], os.getpid())
        self.process = context.Process(target=_work, args=args, daemon=True)
        self.process.start()
        items_far_end.close()
        answers_far_end.close()

    def send(self, number: int, item: Any) -> None:
        """Send an item. It does not wait for the work: a thread of the worker receives items."""
        with self._alive():
            self._items.send(item)
        self.numbers.append(number)

    def receive(self) -> tuple[int, _Answer]:
        """The number of the oldest item, and its answer."""
        with self._alive():
            answer = self.answers.recv()
        return self.numbers.popleft(), answer

    def close(self) -> None:
        self._items.close()
        self.answers.close()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Raise CorpusError if a pipe is closed because the worker has died."""
        try:
            yield
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise CorpusError(
                f"a worker process died ({how}; out of memory?); give fewer --workers, or more "
                "memory"
            ) from None


# ---- in a worker ----------------------------------------------------------------------------


def _work(
    function: Callable[[Any], Any],
    items: Connection,
    answers: Connection,
    near_ends: list[_Worker],
    parent: int,
) -> None:
    """Answer the items that arrive, until the pipe closes or the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for worker in near_ends:  # otherwise a pipe would stay open after the death of its process
        worker.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    queue: SimpleQueue = SimpleQueue()
    Thread(target=_receive_items, args=(items, queue), daemon=True).start()
    while True:
        item = queue.get()
        try:
            answer = True, function(item)
        except Exception as error:
            answer = False, error
        answers.send(answer)
        del item, answer  # otherwise they would stay in memory while the next one is made


def _receive_items(items: Connection, queue: SimpleQueue) -> None:
    """Put items into the queue. Exit when the pipe closes or memory runs out."""
    try:
        while True:
            queue.put(items.recv())
    finally:
        os._exit(1)
