"""Test the `score_mod` of an embedding in a call of FlexAttention that is not this project's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.attention import attend, score_mod_of
from megatron.positional import Combination, load
from tests.attention.test_direct_call import Half, Root, inputs

TEMPERED = {"log_n": {"length": 3, "temper_bias": True}}


@pytest.mark.parametrize(
    "pos",
    [
        Combination([Root(), Half()]), load("rpe"), load("fire", length=2),
        load("log_n + kerple_log", log_n={"length": 3}), load("log_n + kerple_log", **TEMPERED),
    ],
    ids=lambda pos: pos.name,
)  # fmt: skip
def test_a_formula_for_flex_attention(pos):
    q, k, v = inputs(queries=3)
    theta = pos.initial_theta(4).double()
    score_mod = score_mod_of(pos, theta, length=7, offset=4)
    mask = create_block_mask(lambda b, h, i, j: i + 4 >= j, None, None, 3, 7, device="cpu")
    got = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    torch.testing.assert_close(got, attend(q, k, v, pos, theta, query_offset=4))
