"""Test worker processes: order of results, limits, errors, and death at any moment."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from megatron.data.errors import CorpusError
from megatron.data.prepare.workers import Workers

# Repeatedly kills a worker of an endless stream at a random moment. Items and answers are larger
# than a pipe, so the worker is often reading or writing one.
KILLED = """
import itertools, os, random, signal, sys, threading
from megatron.data.errors import CorpusError
from megatron.data.prepare.workers import Workers
def reverse(item):
    return item[::-1]
random.seed(int(sys.argv[1]))
for _ in range(25):
    with Workers(reverse, 3) as workers:
        victim = random.choice(workers._workers).process.pid
        threading.Timer(0.12 * random.random(), os.kill, (victim, signal.SIGKILL)).start()
        try:
            for _ in workers.map(b"x" * 3_000_000 for _ in itertools.count()):
                pass
        except CorpusError as error:
            assert "a worker process died (killed by SIGKILL" in str(error)
            continue
        raise SystemExit("the stream ended")
print("all noticed")
"""


def test_a_worker_killed_at_any_moment_is_an_error(repo_root):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "0"],
        cwd=repo_root, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.stdout == "all noticed\n", done.stderr


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(count):
    with Workers(lambda n: bytes(n * 1000 % 70_001), count) as workers:
        sizes = [len(made) for made in workers.map(range(200))]
    assert sizes == [n * 1000 % 70_001 for n in range(200)]
    with Workers(len, count) as workers:
        assert list(workers.map([])) == []


def test_items_are_taken_as_they_are_needed():
    """At most three items per worker are read ahead of the results, in a stream of any length."""
    taken = 0

    def items():
        nonlocal taken
        for taken in range(1, 1001):  # noqa: B007
            yield b"x" * 100_000

    with Workers(len, 2) as workers:
        for number, _ in enumerate(workers.map(items()), 1):
            assert number <= taken <= number + 6
    assert taken == number == 1000


def refuse_seven(n: int) -> int:
    if n == 7:
        raise ValueError("seven")
    return n


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_of_the_function_comes_in_its_turn(count):
    seen = []
    with pytest.raises(ValueError, match="seven"), Workers(refuse_seven, count) as workers:
        for n in workers.map(range(100)):
            seen.append(n)
    assert seen == list(range(7))


def exit_at_five(n: int) -> int:
    if n == 5:
        import os

        os._exit(3)
    return n


def test_a_worker_that_exits_is_an_error():
    with pytest.raises(CorpusError, match=r"a worker process died \(exit code 3"):  # noqa: SIM117
        with Workers(exit_at_five, 2) as workers:
            list(workers.map(range(100)))


def test_workers_that_have_started_end_if_another_cannot_start(monkeypatch):
    fork, children = os.fork, []

    def fork_twice():
        if len(children) == 2:
            raise BlockingIOError("no process is left")
        if child := fork():
            children.append(child)
        return child

    monkeypatch.setattr(os, "fork", fork_twice)
    with pytest.raises(BlockingIOError), Workers(len, 3):
        pass
    assert len(children) == 2 and not multiprocessing.active_children()
