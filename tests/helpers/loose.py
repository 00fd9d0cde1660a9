"""Run the processes of a job without a launcher, which would end them when one fails."""

import gc
import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing import connection, reduction

import torch

from megatron.engine.job import failure
from megatron.engine.job.store import connect
from tests.helpers.launch import PRELOADED, free_port

SOON = 120
"""The seconds within which all processes must end, on a busy machine; an idle one needs 5. (gloo
would wait half an hour.)"""


def run(function, *args, ranks=2, timeout=200):
    """Run `function(rank, *args)` on each rank.

    Returns:
        (exit codes, outputs, seconds from the first end of a process to the last).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    ready = context.Barrier(ranks)
    started = [start(context, port, rank, ready, function, args) for rank in range(ranks)]
    processes, outputs = zip(*started, strict=True)
    try:
        connection.wait([p.sentinel for p in processes], timeout)
        first = time.monotonic()
        for process in processes:
            process.join(SOON)
        seconds = time.monotonic() - first
        assert all(process.exitcode is not None for process in processes), "a rank goes on"
    finally:
        for process in processes:
            process.kill()
    texts = []
    for output in outputs:
        with os.fdopen(output) as file:
            file.seek(0)
            texts.append(file.read())
    return [process.exitcode for process in processes], texts, seconds


def start(context, port, rank, ready, function, args):
    output = os.memfd_create(f"rank{rank}")
    inherited = reduction.DupFd(output)
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ready.parties),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = context.Process(target=child, args=(environ, inherited, ready, function, args))
    process.start()
    return process, output


def child(environ, output, ready, function, args):
    gc.freeze()
    os.environ.update(environ)
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    failure.GRACE, failure.CAUSE_WAIT, failure.STORE_TIMEOUT = 3.0, 2.0, 1.0
    failure.REPORT_TIMEOUT, failure.POLL_INTERVAL = 5.0, 0.2
    ready.wait()  # those that fail in the same way wait for each other only CAUSE_WAIT seconds
    function(int(environ["RANK"]), *args)


def wait_for_heartbeats():
    """Wait until each rank of this job has heard the others: each sends two heartbeats more."""
    store, keys = connect(SOON), [f"beat/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(keys, timedelta(seconds=SOON))
    for _ in range(2):
        before = store.multi_get(keys)
        while any(a == b for a, b in zip(before, store.multi_get(keys), strict=True)):
            time.sleep(0.02)


def only_line_about_it(texts):
    """Return the only line that all ranks together printed. More lines or a traceback fail."""
    lines = [line for text in texts for line in text.splitlines() if "rank" in line]
    everything = "\n".join(texts)
    assert "Traceback" not in everything and len(lines) == 1, everything
    return lines[0]
