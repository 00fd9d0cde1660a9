"""Test evaluation sequences: which tokens are targets, and that all lengths share them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import ShardError
from megatron.data.samples.evaluation import eval_sequences, eval_span
from tests.helpers.shards import write_documents


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    bounds = [(0, 100), (100, 100), (100, 350), (350, 351), (351, 700)]
    prefix = tmp_path_factory.mktemp("eval") / "text"
    return write_documents(prefix, [range(*each) for each in bounds], np.int32)


@given(st.integers(1, 90), st.integers(1, 800))
def test_each_token_is_a_target_once(text, length, max_tokens):
    row = np.arange(100, 700)  # documents 1 to 4
    if min(max_tokens, len(row) - 1) < length:
        with pytest.raises(ShardError, match=f"not one sequence of {length} "):
            eval_sequences(text, (1, 5), length, max_tokens)
        return
    sequences = eval_sequences(text, (1, 5), length, max_tokens)
    n = len(sequences)
    assert sequences.dtype == np.int64 and sequences.shape == (n, length + 1)
    assert n == min(max_tokens, len(row) - 1) // length
    np.testing.assert_array_equal(sequences[:, :-1].ravel(), row[: n * length])
    np.testing.assert_array_equal(sequences[:, 1:].ravel(), row[1 : n * length + 1])


def test_lengths_share_their_targets(text):
    lengths = (16, 32, 64, 96)
    span = eval_span(text, (0, 5), lengths, 600)
    assert span == 576  # three times 192
    targets = [eval_sequences(text, (0, 5), length, span)[:, 1:].ravel() for length in lengths]
    for other in targets[1:]:
        np.testing.assert_array_equal(targets[0], other)


def test_span_of_lengths_without_a_common_multiple(text):
    assert eval_span(text, (0, 5), (7, 11, 13), 600) == 598  # 1001 would be needed: 46 times 13
    assert eval_span(text, (0, 5), (128, 512), 10**6) == 512
    assert eval_span(text, (0, 5), (128, 1024), 10**6) == 0
    assert eval_span(text, (2, 2), (4,), 100) == 0


def test_messages(text):
    with pytest.raises(
        ShardError,
        match="documents 3 to 4, with at most 100 targets, give 1 tokens: .* shorter lengths",
    ):
        eval_sequences(text, (3, 4), 2, 100)
    with pytest.raises(
        ShardError, match="documents 2 to 2, with at most 100 targets, give 0 tokens: "
    ):
        eval_sequences(text, (2, 2), 2, 100)
    with pytest.raises(ValueError, match=r"documents \(0, 6\) of 5"):
        eval_sequences(text, (0, 6), 2, 100)
