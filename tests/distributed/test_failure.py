"""Test that the failure of one rank ends the others, whether they hang, wait or fail, too."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import deepspeed
import pytest
import torch
import torch.distributed as dist

from megatron.engine.errors import CheckpointError, RunLogError
from megatron.engine.job import failure, join
from megatron.engine.job.error_messages import user_errors
from tests.helpers.loose import SOON, run, wait_for_heartbeats
from tests.helpers.paths import ROOT

HOST = socket.gethostname()


def watched(rank, fault, where):
    """Make rank `where` raise or be killed, while the other hangs or waits in a collective."""
    failure.Watch()
    dist.init_process_group("gloo")
    wait_for_heartbeats()
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
    assert codes == [1, 1] and seconds < SOON
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


def test_a_command_that_refuses_on_one_rank_says_so_to_the_others():
    """The commands import little before they load the config; the job must still hear of it."""
    commands = (
        ("train.py", "absent.yml"),
        ("evaluate.py", "absent.yml", "--load", "absent", "--lengths", "8"),
        ("generate.py", "--load", "absent", "--prompt", "a"),
        ("tools/lm_eval.py", "absent", "--tasks", "a"),
    )
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | job, stderr=subprocess.PIPE
        )
        for command in commands
    ]
    for command, rank in zip(commands, ranks, strict=True):
        error = rank.communicate(timeout=240)[1].decode()
        assert rank.returncode in (1, 2) and f"rank 1 on {HOST}: " in error, (command, error)


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


def ends_late(rank):
    """End rank 0, which holds the store, while rank 1 still watches."""
    failure.STORE_TIMEOUT = 60.0
    watch = failure.Watch()
    dist.init_process_group("gloo")
    dist.barrier()
    time.sleep(4 * rank)
    watch.stop()


def test_who_comes_late_to_a_normal_end_does_not_wait_for_the_store():
    codes, texts, seconds = run(ends_late)
    assert codes == [0, 0] and texts == ["", ""] and seconds < SOON


def test_on_each_machine_one_process_says_what_happened_elsewhere(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "0")
    failure.print_if_elsewhere({"rank": 9, "host": "elsewhere", "text": "error: no disk"})
    failure.print_if_elsewhere({"rank": 1, "host": HOST, "text": "said here already"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    failure.print_if_elsewhere({"rank": 9, "host": "elsewhere", "text": "error: no disk"})
    assert capfd.readouterr().err == "rank 9 on elsewhere: error: no disk\n"


def joins(rank, minutes):
    if minutes:
        os.environ["DEEPSPEED_TIMEOUT"] = minutes
    ours = join.join_job().divided(model_size=2)
    groups = [dist.group.WORLD, ours.model.group, ours.data, deepspeed.comm.new_group([0, 1])]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    print({backend.options._timeout.total_seconds() for backend in backends})
    join.leave_job()


@pytest.mark.parametrize(("said", "minutes"), [(None, join.LONGEST_WAIT), ("90", 90)])
def test_ranks_wait_long_for_what_one_does_alone(said, minutes):
    codes, texts, _ = run(joins, said)
    assert codes == [0, 0] and texts == [f"{{{60.0 * minutes}}}\n"] * 2


def stops(rank, where, silence, seconds=None, port=None):
    """Rank `where` is stopped, while the other waits for it in a collective.

    Args:
        silence: The seconds after which a silent rank is lost.
        seconds: How long it is stopped; None until the other rank has ended.
        port: Another process holds the store there, as torchrun does.
    """
    if port is not None:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ["MASTER_PORT"] = str(port)
    watch = failure.Watch(silence)
    dist.init_process_group("gloo")
    pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    wait_for_heartbeats()
    dist.barrier()
    if rank == where:
        other = int(pids[1 - where])
        waits = f"sleep {seconds}" if seconds else f"while kill -0 {other}; do sleep 0.2; done"
        subprocess.Popen(["sh", "-c", f"({waits}) 2>/dev/null; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    with user_errors():
        dist.barrier()
        dist.barrier()
    watch.stop()
    dist.destroy_process_group()


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_is_stopped_for_too_long_is_named(where):
    codes, texts, _ = run(stops, where, 6)
    assert codes == [1, 1]
    says = f"rank {1 - where} on {HOST}: error: nothing heard for 6 s (heartbeat_timeout) of rank "
    assert texts[1 - where].startswith(f"{says}{where} on {HOST}"), texts


def test_rank_0_is_missed_too_where_the_launcher_holds_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes, texts, _ = run(stops, 0, 6, None, store.port)
    assert codes == [1, 1]
    assert f"nothing heard for 6 s (heartbeat_timeout) of rank 0 on {HOST}" in texts[1], texts


def test_a_rank_that_is_stopped_for_a_while_goes_on():
    codes, texts, _ = run(stops, 1, 30, 4)
    assert codes == [0, 0] and texts == ["", ""]


def joins_late(rank):
    """Join a job whose port another program listens on."""
    if rank == 0:
        other = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        other.listen()
    with user_errors():
        if rank == 0:
            join.join_job()


def test_a_port_in_use_is_named():
    codes, texts, _ = run(joins_late)
    assert codes == [1, 0]
    assert re.fullmatch(f"rank 0 on {HOST}: error: port [0-9]+ of .*set MASTER_PORT.*\n", texts[0])
