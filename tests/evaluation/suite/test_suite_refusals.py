"""Test the suite on a model without finite losses, and on text that is too short."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config import load_config
from megatron.engine.build import tokenizer_of
from megatron.engine.errors import CheckpointError, DivergedError
from megatron.evaluation.suite import all_measures
from megatron.evaluation.suite.all_measures import measure_with_progress
from megatron.evaluation.suite.measure import Subject
from megatron.positional import PositionalError
from tests.evaluation.suite.test_suite import GROUPS, SAMPLE, Letters, induction_model, measured
from tests.helpers.jobs import write_config
from tests.helpers.shards import write_documents


def test_a_broken_model_is_refused_and_short_text_warns_of_nothing():
    short = replace(SAMPLE, sequences_nT=SAMPLE.sequences_nT[:, :33], lengths=(8, 32))
    found = measure_with_progress(Subject(induction_model(), GROUPS, 4096), short, Letters())
    rows = {measure.name: measure.rows for measure in found}
    assert rows["key_tokens"] == rows["far_swap"] == rows["windowed_twin"] == []
    broken = induction_model()
    next(broken.parameters()).data.fill_(torch.nan)
    with pytest.raises(DivergedError, match="losses are not finite"):
        measured(broken)


def test_a_judge_whose_positions_end_earlier_is_named(tmp_path, monkeypatch):
    def require_positions(length):
        raise PositionalError(f"no {length} positions")

    write_documents(tmp_path / "t", np.arange(200).reshape(5, 40))
    keys = {"eval_lengths": [16, 32], "train_batch_size": 8, "split": "2,3,0"}
    config = load_config([write_config(tmp_path / "c.yml", str(tmp_path / "t"), **keys)])
    run = SimpleNamespace(
        model=SimpleNamespace(embedding=SimpleNamespace(require_positions=require_positions)),
        tokenizer=tokenizer_of(config), config=config, said=lambda: "opened",
    )  # fmt: skip
    monkeypatch.setattr(all_measures, "open_run", lambda *given: run)
    with pytest.raises(CheckpointError, match=r"--judge \S+/judge: no 32 positions"):
        all_measures.run_suite(config, tmp_path / "run", judge=tmp_path / "judge")
