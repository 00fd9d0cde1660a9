"""Test that checkpoints of an earlier version resume, evaluate and export as they did then."""

import json
import shutil

import pytest

from megatron.config import load_config
from megatron.engine.checkpoint.exchange import export_checkpoint
from megatron.evaluation.by_length import evaluate_checkpoint
from megatron.pretraining.run import Job
from tests.helpers.jobs import tensors_digest
from tests.helpers.launch import run_ranks
from tests.helpers.paths import FIXTURES

WRITTEN = FIXTURES / "checkpoint"
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
CHANGES = {
    "run": [],
    "run_tp2": ["hidden_dropout=0", "attention_dropout=0", "model_parallel_size=1"],
}
"""Run folder -> the changes to its `config.yml` that are needed for one process."""


def config_of(folder, name, *more):
    here = [f"data_path={WRITTEN / 'data' / 'text_document'}", "eval_context_baseline=0"]
    folders = [f"save={folder / name}", f"load={folder / name}"]
    return load_config(
        [WRITTEN / "config.yml"], [*here, *folders, *CHANGES[name], *more], world_size=1
    )


def resume_all(groups, folder):
    for name in CHANGES:
        Job(config_of(folder, name), groups).run()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the folder of both runs, after resuming them from step 3 to step 6 on one process."""
    folder = tmp_path_factory.mktemp("earlier")
    for name in CHANGES:
        shutil.copytree(WRITTEN / name, folder / name)
    run_ranks(1, resume_all, folder)
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_it_resumes_with_the_numbers_of_the_unbroken_run(resumed, name):
    lines = (resumed / name / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    expected = [row for row in EXPECTED[name] if row["step"] > 3]
    for key in sorted({key for row in expected for key in row}):
        there = {row["step"]: row[key] for row in expected if key in row}
        here = {row["step"]: row[key] for row in found if key in row}
        assert here == pytest.approx(there, abs=1e-5), key


@pytest.mark.parametrize("name", CHANGES)
def test_evaluation_gives_the_table_by_length(resumed, name, tmp_path):
    results = evaluate_checkpoint(config_of(resumed, name), resumed / name, out=tmp_path)
    header, *expected = [line.split(",") for line in EXPECTED["extrapolation"][name]]
    column = header.index("loss")
    there = {int(row[0]): float(row[column]) for row in expected}
    assert {result.length: result.loss for result in results} == pytest.approx(there, abs=1e-4)


def test_every_exported_tensor_is_the_same(tmp_path):
    written = export_checkpoint(WRITTEN / "run", tmp_path)
    names = [path.name for path in written.glob("layer_*.pt")]
    assert {name: tensors_digest(written / name) for name in names} == EXPECTED["exported"]
