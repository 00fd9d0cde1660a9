"""Apply a function to a stream of items in worker processes and keep the order of the results.

At most three items per worker are in progress, so memory is bounded for a stream of any length.
Workers are forked, so they share large objects, such as a vocabulary, with the parent process.
Enter the `with` block before any thread starts, because entering it forks the workers.

Each worker has two pipes, one for items and one for results. The worker's ends of both pipes are
open in that worker only, so when the worker dies, its pipes are closed. The parent's next read or
write on these pipes then raises a CorpusError instead of waiting forever. (If all workers shared
one queue, a dying worker could leave the queue locked or an item half written.) If the parent
process dies, the operating system kills the workers.
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
from megatron.preemption import SIGNALS

_AHEAD = 2  # items that a worker has at a time: the current one and the next
_IN_PROGRESS = 3  # items per worker that were sent and whose results were not yet yielded
_PIPE_BYTES = 1 << 20  # enough for a chunk of text or for its tokens
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_END = object()

_Answer = tuple[bool, Any]  # (True, result) or (False, the error that the function raised)


class Workers:
    """A pool of `count` processes that apply `function` to items. Use it in a `with` block.

    If `count` is 1, there is no pool, and `function` runs in this process.
    """

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count = function, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        if self.count > 1:
            # Block Ctrl-C until the workers ignore it, so that only this process handles it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            # Keep the workers' garbage collectors from writing to shared pages, which copies them.
            gc.freeze()
            try:
                for _ in range(self.count):
                    self._workers.append(_Worker(self.function, self._workers))
            except OSError:  # no process or no memory is left
                self.__exit__()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # the results of unfinished work are not needed
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()
        self._workers = []
        gc.unfreeze()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of `function` for each item, in the order of the items.

        Call this method only once in a `with` block.

        Raises:
            CorpusError: a worker died.
            Exception: `function` raised an error. It is raised again here, after the results of all
                earlier items were yielded.
        """
        if not self._workers:  # one process
            yield from map(self.function, items)
            return
        items, more = iter(items), True
        answers: dict[int, _Answer] = {}  # results by item number, until they are yielded
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
        """Receive the results that workers have sent.

        Args:
            answers: The dict to fill, from the number of an item to its result or error.
            wait_for_one: If no result has arrived yet, wait for one.
        """
        ready = wait([worker.answers for worker in self._workers], None if wait_for_one else 0)
        for worker in self._workers:
            if worker.answers in ready:
                number, answer = worker.receive()
                answers[number] = answer


class _Worker:
    """One worker process and its two pipes.

    Attributes:
        numbers: The numbers of the items that the worker has not finished, oldest first.
    """

    def __init__(self, function: Callable[[Any], Any], others: list[_Worker]) -> None:
        context = multiprocessing.get_context("fork")
        items_far_end, self._items = context.Pipe(duplex=False)
        self.answers, answers_far_end = context.Pipe(duplex=False)
        for pipe in (self._items, answers_far_end):
            with suppress(OSError):  # fails above the user's limit; a small pipe is only slower
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.numbers: deque[int] = deque()
        args = (function, items_far_end, answers_far_end, [self, *others], os.getpid())
        self.process = context.Process(target=_work, args=args, daemon=True)
        self.process.start()
        items_far_end.close()
        answers_far_end.close()

    def send(self, number: int, item: Any) -> None:
        """Send an item to the worker.

        Sending does not wait for earlier items, because a thread of the worker receives items.
        """
        with self._alive():
            self._items.send(item)
        self.numbers.append(number)

    def receive(self) -> tuple[int, _Answer]:
        """Receive the result of the oldest unfinished item. Return (number of the item, result)."""
        with self._alive():
            answer = self.answers.recv()
        return self.numbers.popleft(), answer

    def close(self) -> None:
        self._items.close()
        self.answers.close()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turn the error that a closed pipe causes in the `with` block into a CorpusError.

        Raises:
            CorpusError: the worker died, which closed its pipes.
        """
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
    started_workers: list[_Worker],
    parent: int,
) -> None:
    """Run a worker process until the pipe `items` is closed or the parent process ends.

    Args:
        items: The pipe from which items are received.
        answers: The pipe to which results and errors are sent.
        started_workers: All workers that were started so far. This process inherited the parent's
            ends of their pipes and must close these ends.
        parent: The process id of the parent process.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for worker in started_workers:  # otherwise a pipe would stay open after its process died
        worker.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers already use all cores
    queue: SimpleQueue = SimpleQueue()
    Thread(target=_receive_items, args=(items, queue), daemon=True).start()
    while True:
        item = queue.get()
        try:
            answer = True, function(item)
        except Exception as error:
            answer = False, error
        answers.send(answer)
        del item, answer  # free their memory before the next item is encoded


def _receive_items(items: Connection, queue: SimpleQueue) -> None:
    """Move items from the pipe `items` to `queue`, in a thread of the worker process.

    End the process if the pipe is closed or memory runs out.
    """
    try:
        while True:
            queue.put(items.recv())
    finally:
        os._exit(1)
