"""Test the diagnostics of heads on models whose attention is known, and against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.attention import choose
from megatron.evaluation.suite.heads import heads
from megatron.evaluation.suite.measure import Sample, Subject
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.positional import load
from tests.evaluation.suite.test_suite import GROUPS, SAMPLE, TOKENS, induction_model

SHORT = Sample(SAMPLE.sequences_nT[:4, :65], SAMPLE.documents[:4], 16, (64,), 64)


def measured(model: GPT, sample: Sample = SHORT):
    before = [layer.attention.attend for layer in model.layers]
    found = heads(Subject(model, GROUPS, 4096), sample)
    assert [layer.attention.attend for layer in model.layers] == before
    return {measure.name: measure for measure in found}


def test_a_head_of_the_token_before_looks_one_token_back():
    found = measured(induction_model())
    mass = {row.at["tokens_back"]: row.estimate.value for row in found["heads_layer0"].rows}
    assert mass.pop(2) == pytest.approx(1, abs=0.05) and max(mass.values()) < 0.05
    assert found["heads"].rows[0].also["entropy"] < 0.1 and found["heads"].answer == 0
    assert [row.at for row in found["heads"].rows] == [{"layer": n, "head": 0} for n in (0, 1)]


def gpt(name: str) -> GPT:
    pos = load(name)
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32, training=False)
    return GPT(
        Plan(GPTShape(1, TOKENS, BlockShape(32, 4, num_kv_heads=2), 64), pos, attend, seed=3)
    ).eval()


@torch.no_grad()
def test_the_numbers_are_those_of_the_formulas():
    model = gpt("alibi")
    model.layers[0].attention.query_key_value.weight.normal_(0, 0.5)
    rows = measured(model)["heads_layer0"].rows
    block = model.layers[0]
    tokens = torch.as_tensor(SHORT.sequences_nT[:, :64])
    attend, seen = block.attention.attend, []
    watched = vars(block.attention)
    watched["attend"] = lambda call: seen.append(call) or attend(call)
    model(tokens)
    watched["attend"] = attend
    q, k = seen[0].q_BHTE, seen[0].k_BKSE
    back = torch.arange(64)[:, None] - torch.arange(64) + 1
    slopes = torch.tensor([2.0 ** -(2 * (head + 1)) for head in range(4)])
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 - slopes[:, None, None] * (back - 1)
    p = scores.masked_fill(back < 1, -torch.inf).softmax(-1)
    summary = measured(model)["heads"].rows
    for head in range(4):
        assert summary[head].estimate.value == pytest.approx(
            p[:, head, :, 0].mean().item(), rel=1e-5
        )
        entropy = torch.special.entr(p[:, head]).sum(-1).mean().item()
        assert summary[head].also["entropy"] == pytest.approx(entropy, rel=1e-5)
        for row in (row for row in rows if row.at["head"] == head):
            start = row.at["tokens_back"]
            kept = (back >= start) & (back < 2 * start)
            expected = (p[:, head] * kept).sum(-1).mean().item()
            assert row.estimate.value == pytest.approx(expected, rel=1e-5, abs=1e-9)


@torch.no_grad()
def test_attention_to_the_null_key_counts_as_collapsed():
    model = gpt("sink + alibi")
    model.theta.fill_(-50)
    assert measured(model)["heads"].answer == 0
    model.theta.fill_(50)
    found = measured(model)["heads"]
    assert found.answer == 1 and all(row.also["collapsed"] == "yes" for row in found.rows)
    assert found.says.startswith("100% of the 4 heads are collapsed")


def test_a_model_without_our_attention_has_no_heads():
    assert heads(Subject(torch.nn.Linear(1, 1), GROUPS, 10), SHORT) == []
    assert np.shape(SHORT.sequences_nT) == (4, 65)
