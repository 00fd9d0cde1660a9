"""Apply a function to a stream of items in worker processes and keep the order of the results.

At most three items per worker are in progress, so memory is bounded for a stream of any length.
Workers are forked, so they share large objects, such as a vocabulary, with the parent process.
Enter the `with` block before any thread starts, because entering it forks the workers.

In the parent process, a `ThreadPoolExecutor` has two threads for each worker. Each thread sends an
item to the worker and waits for the answer. While the worker is busy with the item of one thread,
the item of the other thread already waits in the pipe. Each worker has a pipe of its own. Only the
worker has the far end of this pipe open, so the pipe closes when the worker dies. The threads that
wait for answers of the worker then get an error. (In a `ProcessPoolExecutor`, all workers share one
pipe for results. This pipe stays open when a worker dies. If the worker dies while it sends a
result, the parent waits forever for the rest of the result.) If the parent process dies, the
operating system kills the workers.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock
from typing import Any, Self

from megatron.data.errors import CorpusError
from megatron.preemption import SIGNALS

_AHEAD = 2  # items that a worker has at a time: the current one and the next
_IN_PROGRESS = 3  # items per worker that were taken and whose results were not yet yielded
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class _Worker:
    """One worker process and its pipe."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far_end = context.Pipe()
        self._sending, self._receiving = Lock(), Lock()
        args = (function, far_end, os.getpid())
        self.process = context.Process(target=_work, args=args, daemon=True)
        self.process.start()
        far_end.close()  # before the next worker is forked, which would inherit it

    def answer(self, item: Any) -> Any:
        """Send an item to the worker, and return the function's result or raise its error.

        Raises:
            CorpusError: The worker died, which closed its pipe.
        """
        # Several threads may call this method.
        try:
            with self._sending:
                self._pipe.send(item)
                self._receiving.acquire()  # before another thread sends: answers come in this order
            try:
                succeeded, value = self._pipe.recv()
            finally:
                self._receiving.release()
        except (EOFError, OSError):
            with self._sending:  # of several threads that join a process, one would get no code
                self.process.join()
            code = self.process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise CorpusError(
                f"a worker process died ({how}; out of memory?); give fewer --workers, or more "
                "memory"
            ) from None
        if not succeeded:
            raise value
        return value


class Workers:
    """A pool of processes that apply a function to items. Use the pool in a `with` block."""

    # If `count` is 1, there is no pool, and `function` runs in this process.

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count = function, count
        self._workers: list[_Worker] = []
        self._free: SimpleQueue[_Worker] = SimpleQueue()  # a worker once for each item it can take
        self._threads = ThreadPoolExecutor(_AHEAD * count)

    def __enter__(self) -> Self:
        if self.count > 1:
            # Block Ctrl-C until the workers ignore it, so that only this process handles it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            # Keep the workers' garbage collectors from writing to shared pages, which copies them.
            gc.freeze()
            try:
                for _ in range(self.count):
                    self._workers.append(_Worker(self.function))
            except OSError:  # no process or no memory is left
                self.__exit__()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for worker in self._workers * _AHEAD:
                self._free.put(worker)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # the results of unfinished work are not needed
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.process.join()
        gc.unfreeze()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of the pool's function for each item, in the order of the items.

        Call this method only once in a `with` block.

        Raises:
            CorpusError: A worker died while it processed an item. The results of all earlier items
                are yielded first.
            Exception: The function raised this error for an item. The results of all earlier items
                are yielded first.
        """
        if not self._workers:  # one process
            yield from map(self.function, items)
            return
        answers: deque[Future[Any]] = deque()
        for item in items:
            answers.append(self._threads.submit(self._answer, item))
            while answers and (answers[0].done() or len(answers) == _IN_PROGRESS * self.count):
                yield answers.popleft().result()
        while answers:
            yield answers.popleft().result()

    def _answer(self, item: Any) -> Any:
        worker = self._free.get()
        try:
            return worker.answer(item)
        finally:
            self._free.put(worker)


def _work(function: Callable[[Any], Any], pipe: Connection, parent: int) -> None:
    """Run a worker process: receive items and send back the results, until the process is killed.

    Args:
        function: The function that turns an item into a result.
        pipe: The pipe from which items are received, and to which answers are sent.
        parent: The process id of the parent process. If the parent has already ended, exit at once.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers already use all cores
    while True:
        item = pipe.recv()
        try:
            answer = True, function(item)
        except Exception as error:
            answer = False, error
        pipe.send(answer)
        del item, answer  # free their memory before the next item is encoded
