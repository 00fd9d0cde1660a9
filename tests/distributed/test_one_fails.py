"""When one rank fails, all end soon and not with success, and one message says which and why.

Real processes without a launcher that would end the others: rank 0 holds the store.
"""

import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import write_config, write_shards
from launch import PRELOADED

from megatron.engine import alike
from megatron.engine.errors import user_errors
from megatron.engine.log import RunLogError
from megatron.engine.safe_load import CheckpointError
from megatron.parallel import failure

ROOT = Path(__file__).parents[2]
SOON = 25
"""Seconds in which all must have ended: far below gloo's half hour, on a busy machine."""
HOST = socket.gethostname()


def run(function, *args, ranks=2, timeout=120):
    """(exit codes, outputs, seconds from the first end to the last) of `function(rank, *args)`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [start(context, port, rank, ranks, function, args) for rank in range(ranks)]
    processes, outputs = zip(*started, strict=True)
    try:
        multiprocessing.connection.wait([p.sentinel for p in processes], timeout)
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


def start(context, port, rank, ranks, function, args):
    output = os.memfd_create(f"rank{rank}")
    inherited = multiprocessing.reduction.DupFd(output)
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = context.Process(target=child, args=(environ, inherited, function, args))
    process.start()
    return process, output


def child(environ, output, function, args):
    os.environ.update(environ)
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    failure.GRACE, failure.WORD, failure.AGAIN = 2.0, 1.0, 1.0
    function(int(environ["RANK"]), *args)


def only_line_about_it(texts):
    """What all ranks printed together, if it is one line; no traceback is."""
    lines = [line for text in texts for line in text.splitlines() if "rank" in line]
    everything = "\n".join(texts)
    assert "Traceback" not in everything and len(lines) == 1, everything
    return lines[0]


# whole jobs


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("text"))


def job(rank, config, folder, faults):
    """`train.py`, where `faults[rank]` gives this rank other circumstances than the rest."""
    fault = faults.get(rank, {})
    alike.PATIENCE = 1
    os.chdir(fault.get("folder", folder))  # `save` is relative, as it often is
    if "largest_file" in fault:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["largest_file"],) * 2)
    if "reader" in fault:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.argv = ["train.py", str(fault.get("config", config)), *fault.get("options", ())]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def other_checkpoints(folder):
    """Rank 0 sees a checkpoint where rank 1 sees none; they save into one folder."""
    (folder / "0" / "elsewhere").mkdir()
    (folder / "0" / "elsewhere" / "latest").write_text("global_step3")
    options = ["-o", "load=elsewhere", "-o", f"save={folder / 'runs'}"]
    return {rank: {"folder": folder / str(rank), "options": options} for rank in (0, 1)}


CASES = {
    "its text is not there": (
        lambda folder: {1: {"options": ["-o", f"data_path={folder / 'none'}"]}},
        r"rank 1 on HOST: error: FOLDER/none.*",
        [1, 1],
    ),
    "its config is not there": (
        lambda folder: {1: {"config": folder / "none.yml"}},
        r"rank 1 on HOST: 1 problem in the configuration:",
        [1, 2],
    ),
    "its config is another": (
        lambda folder: {1: {"options": ["-o", "optimizer.params.lr=0.5"]}},
        r"rank 0 on HOST: error: rank 1 on HOST has another config than rank 0 on HOST "
        r"\(lr: 0.5 there, 0.01 here\).*",
        [1, 1],
    ),
    "its text is another": (
        lambda folder: {1: {"options": ["-o", f"data_path={write_shards(folder / '1', 50)}"]}},
        r"rank 0 on HOST: error: rank 1 on HOST has another text than rank 0 on HOST .*"
        r"documents: 50 there, 60 here.*",
        [1, 1],
    ),
    "it loads from another disk": (
        other_checkpoints,
        r"rank 0 on HOST: error: elsewhere is not the same folder everywhere: rank 1 on HOST .*",
        [1, 1],
    ),
    "it sees another disk": (
        lambda folder: {rank: {"folder": folder / str(rank)} for rank in (0, 1)},
        r"rank 0 on HOST: error: runs is not the same folder everywhere: rank 1 on HOST does not "
        r"see in it what rank 0 on HOST sees.*",
        [1, 1],
    ),
    "its disk is full": (
        lambda folder: {1: {"largest_file": 4096}},
        r"rank 1 on HOST: error: runs/global_step2 cannot be written \(.*\); checkpoints saved "
        r"before are untouched",
        [1, 1],
    ),
    "nobody reads what it says": (
        lambda folder: {0: {"reader": False}},
        r"rank 0 on HOST: error: nobody reads the output any more",
        [141, 1],
    ),
    "all have the same fault in their config": (
        lambda folder: {rank: {"options": ["-o", "eval_lengths=[100000]"]} for rank in (0, 1)},
        r"rank 0 on HOST: 1 problem in the configuration:",
        [2, 2],
    ),
    "all fail alike": (
        lambda folder: {rank: {"options": ["-o", "eval_lengths=[20000]"]} for rank in (0, 1)},
        r"rank 0 on HOST: error: the valid split .* is shorter than one sequence .*",
        [1, 1],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_end_and_one_message_says_why(tmp_path, prefix, case):
    faults, says, codes = CASES[case]
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    keys = {"save": "runs", "load": "runs", "save_interval": 2, "train_iters": 4}
    config = write_config(tmp_path / "c.yml", prefix, train_micro_batch_size_per_gpu=2, **keys)
    found, texts, seconds = run(job, config, tmp_path, faults(tmp_path))
    pattern = says.replace("HOST", re.escape(HOST)).replace("FOLDER", re.escape(str(tmp_path)))
    assert re.fullmatch(pattern, only_line_about_it(texts)), texts
    assert found == codes
    assert seconds < SOON


# the mechanism alone


def watched(rank, fault, where):
    """Rank `where` raises or is killed, and the other waits: hanging, or in a collective."""
    failure.Watch()
    dist.init_process_group("gloo")
    time.sleep(1)
    dist.barrier()
    with user_errors():
        if rank == where and fault == "raises":
            raise KeyError("a bug")
        if rank == where:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "killed, hangs" or fault == "raises":
            time.sleep(100)  # as an NCCL collective that misses a rank: no exception comes
        dist.barrier()


def test_a_rank_that_hangs_is_ended_too():
    codes, texts, seconds = run(watched, "raises", 1)
    assert codes == [1, 1] and seconds < failure.GRACE + 10
    assert texts[0] == "" and texts[1].startswith(f"rank 1 on {HOST}: Traceback")
    assert texts[1].endswith("KeyError: 'a bug'\n")


@pytest.mark.parametrize(
    ("fault", "where"), [("killed", 1), ("killed", 0), ("killed, hangs", 0)]
)  # fmt: skip
def test_who_is_killed_says_nothing_so_another_does(fault, where):
    codes, texts, _ = run(watched, fault, where)
    assert codes[where] == -signal.SIGKILL and codes[1 - where] == 1
    assert f"rank {1 - where} on {HOST}: {failure.LOST_TEXT}\n" in texts[1 - where]
    assert "Traceback" not in "".join(texts)


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


GLOO = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:50569.")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        (raised(CheckpointError("cannot be loaded"), GLOO), True),
        (dist.DistBackendError("ncclRemoteError: ... or a remote process exiting"), True),
        (RunLogError("Weights & Biases could not be started: connection refused"), False),
        (raised(CheckpointError("cannot be loaded"), EOFError("closed by peer")), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_only_what_torch_says_of_other_processes_is_a_lost_contact(error, lost):
    assert failure.lost_contact(error) == lost


def waits(rank, ends):
    watch = failure.Watch()
    dist.init_process_group("gloo")
    time.sleep(rank)
    dist.barrier()
    watch.stop()
    dist.destroy_process_group()


def test_a_job_that_fares_well_ends_well():
    codes, texts, _ = run(waits, None, ranks=3)
    assert codes == [0, 0, 0] and texts == ["", "", ""]


def test_on_each_machine_one_process_says_what_happened_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    failure._pass_on({"rank": 9, "host": "elsewhere", "text": "error: no disk"})
    failure._pass_on({"rank": 1, "host": HOST, "text": "said here already"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    failure._pass_on({"rank": 9, "host": "elsewhere", "text": "error: no disk"})
    assert capsys.readouterr().err == "rank 9 on elsewhere: error: no disk\n"
