"""Exchange heartbeats with the other ranks of a job, through the job's key-value store.

    key         value
    beat/RANK   "COUNT HOST"; each rank writes a new count every second

If a rank's process is stopped or the network of its machine fails, the rank's count no longer
changes. If the connection to the store's machine fails, the store no longer answers. Each rank
calls its `Hearing.tick` at regular intervals. The silence of another rank is the number of these
calls since the other rank's count last changed. So no rank compares the clocks of two machines.
Time during which the whole job is suspended does not count as silence.
"""

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  documented

from megatron import launcher
from megatron.engine.job.store import connect

PATIENCE = 5
"""After this many calls of `tick` without an answer of the store, `Hearing` connects again."""
BUSY_INTERVAL = 0.05
"""The seconds between two heartbeats while the ranks agree where to end early (`preemption`)."""
HOST = socket.gethostname()


class Talk(threading.Thread):
    """A thread that writes and reads heartbeats in the job's key-value store."""

    # The thread uses one connection. It ends if the connection fails, or after the event `over` is
    # set. It blocks for ever if the store does not answer.

    def __init__(
        self, ranks: int, reads_every: int, interval: float, exchange: Callable[[Store], bool]
    ):
        super().__init__(name="heartbeat", daemon=True)
        self.over = threading.Event()
        self.beats: list[bytes] = []  # of all ranks
        self.answers = 0
        self.refused = False
        # Two ranks of each machine read all counts, because one of the two may be the stopped one.
        # The others read the counts once, for the machines' names.
        self.reads = launcher.local_rank() < 2
        self._ranks, self._reads_every, self._interval = ranks, reads_every, interval
        self._exchange = exchange
        self.start()

    def run(self) -> None:
        try:
            store, pause = connect(), 0.0
            while not self.over.wait(pause):
                pause = self._turn(store)
        except (OSError, RuntimeError) as error:  # it is lost: `Hearing` starts another talk
            self.refused = isinstance(error, ConnectionRefusedError)

    def _turn(self, store: Store) -> float:
        """Exchange heartbeats once, and return the seconds to wait before the next call."""
        # Each call writes this rank's heartbeat. Some calls also read the heartbeats of all ranks.
        store.set(f"beat/{os.environ['RANK']}", f"{time.monotonic_ns()} {HOST}")
        keys = [f"beat/{rank}" for rank in range(self._ranks)]
        due = self.reads and self.answers % self._reads_every == 0
        if (due or not self.beats) and store.check(keys):
            self.beats = store.multi_get(keys)
        busy = self._exchange(store)
        self.answers += 1
        return BUSY_INTERVAL if busy else self._interval


class Hearing:
    """Watches the heartbeats of all ranks, and finds the ranks that are silent for too long.

    Attributes:
        answered: Whether the job's key-value store has ever answered.
        refused_for: The seconds for which the store's machine has refused connections.
    """

    # A thread reads the heartbeats. `tick`, called every `interval` seconds, evaluates what was
    # read.

    def __init__(self, bound: float, interval: float, exchange: Callable[[Store], bool]):
        """Start a thread that exchanges heartbeats with the other ranks.

        Args:
            bound: The seconds of silence after which a rank counts as lost.
            interval: The usual number of seconds between two heartbeats.
            exchange: A function of the job's key-value store. The thread calls the function after
                each heartbeat. The function returns whether the next heartbeat should follow sooner
                than usual.
        """
        self.answered = False
        self.refused_for = 0.0
        self._bound, self._interval, self._exchange = bound, interval, exchange
        self._ranks = int(os.environ["WORLD_SIZE"])
        self._beats: list[bytes] = []
        self._silence: dict[int, float] = defaultdict(float)  # by rank
        self._unanswered, self._answers, self._patience = 0.0, 0, 0
        self._talk = self._new_talk()

    def tick(self) -> None:
        """Update how long each rank and the store have been silent.

        The method uses the heartbeats that the thread has read since the last call of the method.
        """
        # If the store has not answered for more than PATIENCE calls, a thread with a new connection
        # starts.
        talk = self._talk
        new, self._answers = talk.answers > self._answers, talk.answers
        self.refused_for = 0.0 if new else self.refused_for + self._interval * talk.refused
        self._unanswered = 0.0 if new else self._unanswered + self._interval
        self._patience = 0 if new else self._patience + 1
        self.answered |= new
        if new and talk.beats:
            self._compare(talk.beats)
        if not talk.is_alive() or self._patience > PATIENCE:
            talk.over.set()
            self._talk, self._answers, self._patience = self._new_talk(), 0, 0

    def lost(self) -> str | None:
        """Return an error message if a rank or the store is silent for too long, otherwise None."""
        if self._unanswered > self._bound and self.answered:
            holder = "torchrun" if launcher.launcher_has_store() else "rank 0"
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            far = [rank for rank in range(len(self._beats)) if self._host(rank) != HOST]
            return self._text(far or [0], f"; {holder} does not answer at {where}")
        silent = [rank for rank, seconds in self._silence.items() if seconds > self._bound]
        return self._text(silent, "") if silent else None

    def stop(self) -> None:
        """Stop exchanging heartbeats."""
        self._talk.over.set()
        self._talk.join(self._interval)

    def _new_talk(self) -> Talk:
        return Talk(self._ranks, max(1, int(self._bound / 20)), self._interval, self._exchange)

    def _compare(self, beats: list[bytes]) -> None:
        """Update how long each rank has been silent.

        Args:
            beats: The last heartbeat of each rank.
        """
        for rank, beat in enumerate(beats):
            same = self._talk.reads and self._beats and beat == self._beats[rank]
            self._silence[rank] = self._silence[rank] + self._interval if same else 0.0
        self._beats = beats

    def _host(self, rank: int) -> str:
        return self._beats[rank].decode().partition(" ")[2] if self._beats else "?"

    def _text(self, ranks: list[int], more: str) -> str:
        names = ", ".join(f"rank {rank} on {self._host(rank)}" for rank in ranks)
        return (
            f"error: nothing heard for {self._bound:g} s (heartbeat_timeout) of {names}{more}; the "
            "processes are stopped, or the network between the machines is cut"
        )
