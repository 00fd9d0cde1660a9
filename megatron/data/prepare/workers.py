"""A function over a stream of items in worker processes, results in the order of the items.

At most three items a worker are under way, so memory has a bound whatever the length of the
stream. Workers are forked, so they share what the function holds, a vocabulary for one; they must
be started before anything else starts a thread or takes a lock that they would keep (`with` does
that).

Each worker has two pipes of its own, one for items and one for results, and their far ends are
open in that worker alone. So a worker that dies, at whatever moment, ends its pipes: the next
read or write there fails, and that is an error (CorpusError), never a wait without end. (A queue
that workers share has a lock and a pipe that a dead worker can leave taken or half written.)
Workers die with the process that started them, however it ends.
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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megatron.data.errors import CorpusError

_AHEAD = 2  # items that one worker has: the one it works on and the next
_UNDER_WAY = 3  # items a worker that are sent and not yet handed on; results wait for their turn
_PIPE_BYTES = 1 << 20  # a chunk of text or its tokens in one go
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_END = object()


class Workers:
    """`count` processes that run `function`; with 1, this process does."""

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count = function, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        if self.count > 1:
            # Ctrl-C is for this process to answer; it waits until the workers know.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            gc.freeze()  # or their collector writes to, and so copies, the pages that they share
            try:
                for _ in range(self.count):
                    self._workers.append(_Worker(self.function, self._workers))
            except BaseException:
                self.__exit__()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # whatever they still do, nobody waits for it
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()
        self._workers = []
        gc.unfreeze()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """`function` of each item, in order; once. CorpusError if a worker dies."""
        if not self._workers:
            yield from map(self.function, items)
            return
        items, more = iter(items), True
        answers: dict[int, tuple[bool, Any]] = {}  # those that wait for their turn
        turn = sent = 0
        while more or turn < sent:
            idlest = min(self._workers, key=lambda worker: len(worker.numbers))
            room = len(idlest.numbers) < _AHEAD and sent - turn < _UNDER_WAY * self.count
            if more and room:
                item = next(items, _END)
                more = item is not _END
                if more:
                    idlest.send(sent, item)
                    sent += 1
            self._collect(answers, wait_for_one=not (more and room) and turn < sent)
            while turn in answers:
                succeeded, value = answers.pop(turn)
                if not succeeded:
                    raise value
                yield value
                turn += 1

    def _collect(self, answers: dict[int, tuple[bool, Any]], wait_for_one: bool) -> None:
        by_pipe = {worker.answers: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), None if wait_for_one else 0):
            number, answer = by_pipe[pipe].receive()
            answers[number] = answer


class _Worker:
    """One process and its two pipes; `numbers`: the items it has, oldest first."""

    def __init__(self, function: Callable[[Any], Any], others: list[_Worker]) -> None:
        context = multiprocessing.get_context("fork")
        its_items, self._items = context.Pipe(duplex=False)
        self.answers, its_answers = context.Pipe(duplex=False)
        for pipe in (self._items, its_answers):
            with suppress(OSError):  # the system's limit; a small pipe only costs some time
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.numbers: deque[int] = deque()
        self.process = context.Process(
            target=_work,
            args=(function, its_items, its_answers, [self, *others], os.getpid()),
            daemon=True,
        )
        self.process.start()
        its_items.close()
        its_answers.close()

    def send(self, number: int, item: Any) -> None:
        """Never waits long: a thread of the worker takes what comes, while it works."""
        try:
            self._items.send(item)
        except OSError:
            raise self._death() from None
        self.numbers.append(number)

    def receive(self) -> tuple[int, tuple[bool, Any]]:
        try:
            answer = self.answers.recv()
        except (EOFError, OSError):
            raise self._death() from None
        return self.numbers.popleft(), answer

    def close(self) -> None:
        self._items.close()
        self.answers.close()

    def _death(self) -> CorpusError:
        self.process.join(5)
        code = self.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CorpusError(
            f"a worker process died ({how}; for want of memory?); give fewer --workers, or more "
            "memory"
        )


# ---- in a worker ----------------------------------------------------------------------------


def _work(
    function: Callable[[Any], Any],
    items: Connection,
    answers: Connection,
    near_ends: list[_Worker],
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for worker in near_ends:  # else a pipe would outlive the process that it belongs to
        worker.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    queue: SimpleQueue = SimpleQueue()
    Thread(target=_take, args=(items, queue), daemon=True).start()
    while True:
        item = queue.get()
        try:
            answer = True, function(item)
        except Exception as error:
            answer = False, error
        answers.send(answer)
        del item, answer  # or they would be held while the next is made


def _take(items: Connection, queue: SimpleQueue) -> None:
    """Put what comes into the queue; the process ends with the pipe, or if memory does not do."""
    try:
        while True:
            queue.put(items.recv())
    finally:
        os._exit(1)
