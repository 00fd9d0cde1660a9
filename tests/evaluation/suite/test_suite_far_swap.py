"""Test which text the far-swap measure puts in place of far text, and that it is no copy of it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.errors import DataError
from megatron.evaluation.suite.context import of_other_documents
from megatron.evaluation.suite.measure import read_sample
from tests.helpers.shards import write_documents


@pytest.mark.parametrize(
    ("documents", "others"),
    [
        ([0, 0, 1, 1, 1, 2], [2, 3, 5, 0, 1, 0]),  # the n-th gets the n-th after its document
        ([0, 0, 0, 1], [3, 3, 3, 0]),  # the next document has one sequence for three
        ([4, 7], [1, 0]),
    ],
)
def test_far_text_is_that_of_the_documents_that_follow(documents, others):
    assert of_other_documents(np.array(documents)).tolist() == others


READ = {"train_length": 8, "tokens": 3000, "eod": 65000}


def test_copies_of_a_document_are_one_document_and_are_not_swapped_with_each_other(tmp_path):
    rng = np.random.default_rng(0)
    first, second, third = rng.integers(9, 60000, (3, 205))
    shifted = np.append(first[40:], rng.integers(9, 60000, 40))  # most of it is a copy
    shards = write_documents(tmp_path / "t", [first, second, first, third, second, shifted])
    sample = read_sample(shards, (0, 6), (100, 200), **READ)
    assert sample.documents.tolist() == [0, 0, 0, 1, 1, 3]
    others = of_other_documents(sample.documents)
    assert (sample.documents[others] != sample.documents).all()
    for document, text in ((0, first), (1, second), (3, third)):
        of_it = sample.sequences_nT[sample.documents == document]
        assert np.isin(of_it, [*text, *shifted] if document == 0 else text).all()
    # Sequences of 11 tokens from different parts of exact copies have no tokens in common.
    short = read_sample(shards, (0, 5), (10,), **(READ | {"tokens": 16 * 11}))
    assert set(short.documents) == {0, 1, 3}


def test_no_sequence_has_the_end_of_a_document_inside(tmp_path):
    """Packed samples of a fixed length, and a text in which the end's text stands."""
    rng = np.random.default_rng(0)
    documents = rng.integers(9, 60000, (6, 205))
    packed = documents.copy()
    packed[:, 100] = READ["eod"]
    shards = write_documents(tmp_path / "t", [*packed[:2], *documents[2:]])
    assert {*read_sample(shards, (0, 6), (100, 200), **READ).documents} == {2, 3, 4, 5}
    parts = read_sample(shards, (0, 6), (50,), **READ | {"tokens": 6 * 4 * 51})
    assert {*parts.documents} == {*range(6)} and (parts.sequences_nT != READ["eod"]).all()
    shards = write_documents(tmp_path / "p", packed)
    with pytest.raises(DataError, match="all long documents contain 65000, the end of a document"):
        read_sample(shards, (0, 6), (100, 200), **READ)
    shards = write_documents(tmp_path / "q", [*packed, documents[0]])
    with pytest.raises(DataError, match="repeat each other or have an end in them, and --suite"):
        read_sample(shards, (0, 7), (100, 200), **READ)


def test_copies_of_a_single_document_are_refused(tmp_path):
    shards = write_documents(tmp_path / "t", [np.arange(300)] * 20)
    with pytest.raises(DataError, match="all documents with 201 tokens repeat each other"):
        read_sample(shards, (0, 20), (100, 200), **READ)
