"""A job over two hosts that meets cuts of the network and the death of a host.

The hosts are network namespaces (see `two_hosts`). The weights at the end are, bit for bit, those
of four ranks that meet no fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.cluster.two_hosts import STEPS
from tests.helpers.jobs import digest, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import ROOT

PATIENCE = 600
"""Seconds for the rehearsal on a busy machine. At a load of 8 on two cores it takes 90."""
ROOT_THERE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def reason_to_skip() -> str | None:
    """Why this machine cannot play two hosts, or None."""
    missing = [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]
    if missing:
        return f"the rehearsal on two hosts needs {', '.join(missing)} (util-linux, iproute2)"
    make_link = ["ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    done = subprocess.run([*ROOT_THERE, *make_link], capture_output=True, text=True)
    if done.returncode:
        return f"the rehearsal on two hosts may not make network namespaces here: {done.stderr}"
    return None


@pytest.mark.timeout(PATIENCE + 120)
def test_cuts_and_the_death_of_a_host_change_no_weight(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(f"{reason}; as root on Linux run `python -m pytest tests/cluster`")
    keys = {"train_iters": STEPS, "save_interval": 10, "keep_last_n_checkpoints": 2}
    keys |= {"eval_iters": 0, "train_micro_batch_size_per_gpu": 2, "hidden_dropout": 0.1}
    for host in ("a", "b", "alone"):
        prefix = write_shards_in(tmp_path / host)
        run = str(tmp_path / ("alone/run" if host == "alone" else "run"))
        folders = {"save": run, "load": run, "heartbeat_timeout": 10}
        write_config(tmp_path / host / "c.yml", prefix, **keys, **folders)
    rehearsal = subprocess.Popen(
        [*ROOT_THERE, sys.executable, "-m", "tests.cluster.two_hosts", tmp_path],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        run_ranks(4, run_job, tmp_path / "alone" / "c.yml")
        said, _ = rehearsal.communicate(timeout=PATIENCE)
    finally:
        if rehearsal.poll() is None:
            os.killpg(rehearsal.pid, signal.SIGKILL)
    assert rehearsal.returncode == 0, said
    print(said)
    texts = [(tmp_path / host / "output").read_text() for host in ("a", "b")]
    # The first message names the ranks that are silent so far: one or both of the other host.
    heard = r"error: nothing heard for 10 s \(heartbeat_timeout\) of rank "
    assert re.search(f"{heard}[23] on host-b", texts[0]), texts[0]
    # A rank that was cut off before it heard from anybody knows only the address of rank 0.
    silent = r"[01] on (host-a|\?; rank 0 does not answer at host-a)"
    assert re.search(heard + silent, texts[1]), texts[1]
    assert "resuming from" in texts[0]
    assert digest(tmp_path / "run") == digest(tmp_path / "alone" / "run")


def write_shards_in(folder):
    folder.mkdir()
    return write_shards(folder)
