"""Test that all ranks end soon if one fails, and that one message names the rank and the error."""

import os
import re
import resource
import runpy
import socket
import sys

import pytest

from megatron.engine.job import agreement
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.loose import SOON, only_line_about_it, run
from tests.helpers.paths import ROOT

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("text"))


def job(rank, config, folder, faults):
    """Run `train.py` on this rank, after applying the fault `faults[rank]`."""
    fault = faults.get(rank, {})
    agreement.PATIENCE = 1
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
    """Make rank 0 see a checkpoint in `load` and rank 1 none; both save into one folder."""
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
        r"rank 0 on HOST: error: runs is not the same folder everywhere: rank 1 on HOST "
        r"sees other files in it than rank 0 on HOST.*",
        [1, 1],
    ),
    "its disk is full": (
        lambda folder: {1: {"largest_file": 4096}},
        r"rank 1 on HOST: error: runs/global_step2 cannot be written \(.*\); checkpoints saved "
        r"before are untouched",
        [1, 1],
    ),
    "nobody reads its output": (
        lambda folder: {0: {"reader": False}},
        r"rank 0 on HOST: error: nobody reads the output any more",
        [141, 1],
    ),
    "all have the same fault in their config": (
        lambda folder: {rank: {"options": ["-o", "eval_lengths=[100000]"]} for rank in (0, 1)},
        r"rank 0 on HOST: 1 problem in the configuration:",
        [2, 2],
    ),
    "all fail in the same way": (
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
