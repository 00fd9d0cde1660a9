"""Test that imagined ranks communicate as real ones do, and that planted faults are found.

Every cell of the covering set of layouts is compared by a script, tests/rehearsal/gloo.py; its log
is kept beside it.
"""

import re

import pytest
import yaml

from tests.distributed.matrix import Cell
from tests.distributed.test_matrix import CELLS
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import call, run_script
from tests.helpers.paths import ROOT
from tests.rehearsal.faults import FAULTS, HARMLESS, rehearsed
from tests.rehearsal.gloo import both, first_difference, in_a_process

SAMPLE = [
    Cell(tp=2, pp=2, dp=1, zero=1, dtype="bf16", pos="layers", tied=True),
    Cell(tp=1, pp=1, dp=2, zero=3, dtype="fp32", pos="rpe", tied=False),
]


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_imagined_ranks_communicate_as_gloo_processes_do(tmp_path, cell):
    imagined, real = both(cell, tmp_path, write_shards(tmp_path), async_save=cell.zero == 3)
    assert not first_difference(imagined, real)
    assert min(len(thread) for rank in real for thread in rank) > 3
    # A comparison that cannot fail would be none.
    imagined[1][0][-1] = imagined[1][0][-1]._replace(where="elsewhere")
    assert first_difference(imagined, real).startswith("rank 1: ")


def test_the_log_has_every_cell_of_the_covering_set():
    lines = (ROOT / "tests" / "rehearsal" / "gloo.log").read_text().splitlines()
    equal = {line.split()[0] for line in lines if line.endswith("events, all equal ok")}
    assert equal == {cell.name for cell in CELLS}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return in_a_process(rehearsed, folder, write_shards(folder), [*FAULTS, *HARMLESS])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(verdicts, name):
    *_, named = FAULTS[name]
    problem, *lines = verdicts[name].splitlines()
    assert problem.startswith("error: ") and problem.endswith(":"), verdicts[name]
    ranks = set(re.findall(r"rank (\d)|ranks (\d)", "\n".join(lines[:2])))
    assert len(ranks) > 1 and named in "\n".join(lines[:2]), verdicts[name]


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(verdicts, name):
    assert verdicts[name].endswith("collectives and messages fit together"), verdicts[name]


def test_the_command_rehearses_a_large_model_and_writes_nothing(tmp_path):
    config = {"data_path": "missing", "vocab_file": "missing", "save": str(tmp_path / "run")}
    own = write_config(tmp_path / "own.yml", "missing", **config, num_layers=9, train_batch_size=64)
    keys = yaml.safe_load(own.read_text())
    keys |= {"tokenizer_type": "HFTokenizer", "hidden_size": 8192, "seq_length": 4096}
    own.write_text(yaml.safe_dump(keys | {"pipe_parallel_size": 2, "model_parallel_size": 2}))
    text = call("train.py", own, "--rehearse", "--gpus", "8")
    assert re.search(r"8 ranks rehearsed a step, a validation and a save: all their [\d,]+ ", text)
    assert list(tmp_path.iterdir()) == [own]


def test_the_command_refuses_what_the_config_refuses(tmp_path):
    own = write_config(tmp_path / "own.yml", "missing", model_parallel_size=3)
    options = {"cwd": ROOT, "environ": {}}
    code, text = run_script(ROOT / "train.py", own, "--rehearse", "--gpus", "3", **options)
    assert code == 2 and "model_parallel_size: 3 does not divide" in text
    code, text = run_script(ROOT / "train.py", own, "--rehearse", "--mfu", "0.3", **options)
    assert code == 2 and "--mfu and --price need --plan" in text
