"""Test the texts of the passkey measure with a tokenizer whose template begins texts with BOS."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megatron.data.tokenizers.build import build_tokenizer
from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Sample
from tests.helpers.pipelines import write_pipeline


def test_no_token_that_begins_documents_stands_inside_a_text(tmp_path):
    read = []
    subject = SimpleNamespace(losses=lambda texts: read.append(texts) or 0.0 * texts[:, 1:])
    tokenizer = build_tokenizer("HFTokenizer", write_pipeline("llama2", tmp_path))
    texts = np.full((4, 257), 1000)  # an id that the needle does not have
    recall.passkey(subject, Sample(texts, np.arange(4), 32, (128, 256), 4096), tokenizer)
    found = set(np.concatenate([text.ravel() for text in read]).tolist())
    assert {*tokenizer.encode("\nThe pass key is").tolist(), 1000} <= found
    assert tokenizer.begin and not found & {*tokenizer.begin, tokenizer.eod}


def test_a_tokenizer_without_digits_has_no_passkey():
    """The answer is a single unknown token, so it is equal to its reverse."""
    tokenizer = SimpleNamespace(encode=lambda text: np.full(len(text.split()), 7), begin=[])
    texts = np.arange(4 * 257).reshape(4, 257)
    subject = SimpleNamespace(losses=lambda texts: 0.0 * texts[:, 1:])
    sample = Sample(texts, np.arange(4), 32, (128, 256), 4096)
    found = recall.passkey(subject, sample, tokenizer)
    assert found.rows == [] and found.answer == []
    assert found.says == (
        "Passkey: not measured. No text has room, or no answer differs from its reverse."
    )
