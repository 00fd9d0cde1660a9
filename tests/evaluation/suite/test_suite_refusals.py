"""Test the suite on a model without finite losses, and on text that is too short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.engine.errors import DivergedError
from megatron.evaluation.suite.all_measures import measure_with_progress
from megatron.evaluation.suite.measure import Subject
from tests.evaluation.suite.test_suite import GROUPS, SAMPLE, Letters, induction_model, measured


def test_a_broken_model_is_refused_and_short_text_warns_of_nothing():
    short = replace(SAMPLE, sequences_nT=SAMPLE.sequences_nT[:, :33], lengths=(8, 32))
    found = measure_with_progress(Subject(induction_model(), GROUPS, 4096), short, Letters())
    rows = {measure.name: measure.rows for measure in found}
    assert rows["key_tokens"] == rows["far_swap"] == rows["windowed_twin"] == []
    broken = induction_model()
    next(broken.parameters()).data.fill_(torch.nan)
    with pytest.raises(DivergedError, match="losses are not finite"):
        measured(broken)
