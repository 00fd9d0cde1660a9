"""What `megatron/launcher.py` concludes from the variables that launchers set."""

from __future__ import annotations

import os
import sys
from unittest import mock

import psutil
import pytest

from megatron import launcher
from tests.helpers.launch import run_script
from tests.helpers.paths import ROOT

CONFIG = str(ROOT / "configs" / "quickstart.yml")
TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STEP = {  # of srun --nodes=2 --ntasks=4
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
ONE_NODE = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "gpu07"}
BATCH = {  # of the script that sbatch starts, before any srun
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
TWO_MACHINES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
MASTER = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"} | MASTER


@pytest.fixture
def environ():
    """Set the given variables only; return those that torch reads, after `join`."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "TORCHELASTIC_", "KERPLE_")
    before = dict(os.environ)

    def use(variables):
        for name in list(os.environ):
            if name in TORCHS or name.startswith(prefixes):
                del os.environ[name]
        os.environ.update(variables)

    use({})
    yield use
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (STEP, "gpu07"),
        (ONE_NODE, "127.0.0.1"),
        (STEP | MASTER, "gpu07"),
        (OPEN_MPI, "127.0.0.1"),
        (MPICH, "127.0.0.1"),
        (MVAPICH, "127.0.0.1"),
        (TWO_MACHINES | MASTER, "gpu07"),
        # mpirun in a batch job starts its helpers, and so the tasks on other machines, with srun
        (TWO_MACHINES | BATCH, "gpu07"),
        (TWO_MACHINES | BATCH | STEP, "gpu07"),
        # srun with a plugin for MPI
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "gpu07"),
    ],
)
def test_the_tasks_of_a_launcher_become_one_job(environ, variables, address):
    environ(variables)
    assert launcher.world_size() == "4" and not launcher.is_alone()
    launcher.join()
    found = [os.environ[name] for name in TORCHS]
    assert found[:4] == ["3", "4", "1", address]
    given = variables.get("MASTER_PORT")
    assert found[4] == given if given else int(found[4]) in launcher.PORTS


def test_the_port_follows_from_the_job(environ):
    ports = []
    for change in ({}, {"SLURM_PROCID": "0"}, {"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}):
        environ(STEP | change)
        launcher.join()
        ports.append(os.environ["MASTER_PORT"])
    assert ports[0] == ports[1] and len(set(ports)) == 3


def test_tasks_in_containers_have_one_port(environ, monkeypatch):
    """There each task may see another launcher, or none: the scheduler's names decide."""
    for variables, name in (
        (ONE_NODE, "77.0"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-1@1"}, "prterun-a-1@1"),
    ):
        ports = set()
        for pid in (11, 12):
            own = mock.Mock(pid=pid)
            own.environ.return_value, own.cmdline.return_value = {}, []
            environ(variables)
            monkeypatch.setattr(psutil, "Process", lambda own=own: mock.Mock(parents=lambda: [own]))
            launcher.join()
            ports.add(os.environ["MASTER_PORT"])
            assert os.environ["KERPLE_JOB"] == name
        assert len(ports) == 1
        environ(variables)
        monkeypatch.setattr(psutil, "Process", mock.Mock(side_effect=psutil.AccessDenied(1)))
        launcher.join()
        assert os.environ["MASTER_PORT"] in ports and not launcher.launcher_has_ended()


@pytest.mark.parametrize(
    ("variables", "world", "alone"),
    [
        ({}, "1", True),
        (BATCH, "1", True),  # one process, whatever the number of tasks
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, "1", True),  # srun --pty bash
        (TORCHRUN, "2", False),
        (STEP | TORCHRUN, "2", False),  # srun of one torchrun for each node
        (TORCHRUN | {"WORLD_SIZE": "1"}, "1", False),
    ],
)
def test_variables_of_torch_stay_and_a_batch_script_is_alone(environ, variables, world, alone):
    environ(variables)
    before = {name: os.environ.get(name) for name in TORCHS}
    assert launcher.world_size() == world and launcher.is_alone() == alone
    launcher.join()
    assert {name: os.environ.get(name) for name in TORCHS} == before


def test_a_shell_of_several_tasks_can_run_one_process(environ, monkeypatch):
    """As `srun -n4 --pty bash` starts it. The tasks themselves have no terminal."""
    environ(STEP | {"WORLD_SIZE": "1"})
    assert launcher.task().size > 1
    monkeypatch.setattr(os, "isatty", lambda file: file == 0)
    assert launcher.task() is None and launcher.world_size() == "1"
    launcher.join()
    assert "RANK" not in os.environ
    environ(STEP)
    assert launcher.task().size > 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[007-010,12],login", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[04-08]", "r1n04"),
        ("login,gpu[1-2]", "login"),
        ("gpu[1-2]-ib.site,x", "gpu1-ib.site"),
    ],
)
def test_rank_0_is_on_the_first_node(environ, nodes, first):
    environ(STEP | {"SLURM_STEP_NODELIST": nodes})
    launcher.join()
    assert os.environ["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (TWO_MACHINES | {"OMPI_COMM_WORLD_RANK": "0"}, "add -x MASTER_ADDR=HOST"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, .* start with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_PORT is missing"),
    ],
)
def test_tasks_that_cannot_meet_are_refused(environ, variables, says):
    environ(variables)
    with pytest.raises(launcher.LaunchError, match=says):
        launcher.join()


def test_only_rank_0_says_why(environ):
    environ(TWO_MACHINES)
    with pytest.raises(SystemExit):
        launcher.join()


def call(*arguments, only="stderr", **variables):
    given = [ROOT / "train.py", CONFIG, "--check", *arguments]
    return run_script(*given, cwd=ROOT, environ=os.environ | variables, only=only)


def test_a_check_joins_no_job(environ):
    # No store is open at this address: a process that joined would wait for it.
    job = STEP | TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "6"}
    code, text = call(only="stdout", **job)
    assert code == 0 and "world_size" in text and " 6 " in text, text
    code, text = call("-o", "hidden_size=x", **job)
    assert code == 2 and text.startswith("1 problem in the configuration:"), text
    code, text = call("-o", "model_parallel_size=3", **STEP)
    assert code == 2 and "4 process(es) cannot form groups" in text


def test_train_alone_starts_a_rank_for_each_gpu(environ, monkeypatch, capsys):
    import torch

    import train

    started = []
    monkeypatch.setattr(launcher, "start_ranks", lambda count: started.append(count) or 7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(sys, "argv", ["train.py", CONFIG])
    assert train.main() == 7 and started == [3]
    monkeypatch.setattr(sys, "argv", ["train.py", CONFIG, "--check"])
    assert train.main() == 0 and started == [3]
    monkeypatch.setattr(sys, "argv", ["train.py", CONFIG, "-o", "hidden_size=x"])
    for alone in (False, True):  # under a launcher, or with one GPU, no process is started
        if alone:
            environ({})
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        else:
            environ(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | {"RANK": "0"})
        with pytest.raises(SystemExit):
            train.main()
    assert started == [3] and "hidden_size" in capsys.readouterr().err
