"""Test fingerprints of the text: which changes they show, and which they do not."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.shards import fingerprint as module
from megatron.data.shards.fingerprint import fingerprint
from megatron.data.shards.joined import join
from megatron.data.shards.merge import merge
from megatron.data.shards.reader import ShardReader

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 250, size) for size in (40, 0, 70, 30, 40)]


def test_equal_documents_have_one_fingerprint_however_they_are_divided(make_shards, tmp_path):
    whole = make_shards(DOCUMENTS)
    parts = [make_shards(DOCUMENTS[:2], name="a"), make_shards(DOCUMENTS[2:], name="b")]
    merge([part.prefix for part in parts], tmp_path / "merged")
    found = {fingerprint(each) for each in (whole, join(parts), ShardReader(tmp_path / "merged"))}
    assert len(found) == 1 and len(found.pop()) == 32
    assert len(fingerprint(make_shards([], name="none"))) == 32


def changed(number: int, at: int) -> list[np.ndarray]:
    documents = [document.copy() for document in DOCUMENTS]
    documents[number][at] += 1
    return documents


@pytest.mark.parametrize(
    "documents",
    [
        changed(0, 0),
        changed(2, 35),
        changed(4, -1),
        [DOCUMENTS[4], *DOCUMENTS[1:4], DOCUMENTS[0]],  # two documents of one length, swapped
        [DOCUMENTS[1], DOCUMENTS[0], *DOCUMENTS[2:]],  # the same tokens, divided otherwise
        DOCUMENTS[:4],
        [*DOCUMENTS, []],
    ],
)
def test_any_change_to_a_small_data_set_is_seen(make_shards, documents):
    assert fingerprint(make_shards(DOCUMENTS)) != fingerprint(make_shards(documents, name="other"))


def test_tokenising_anew_is_seen(make_shards):
    """Even if the numbers are the same in another dtype."""
    wide = make_shards(DOCUMENTS, np.int32, "wide")
    assert fingerprint(make_shards(DOCUMENTS)) != fingerprint(wide)


def test_of_a_large_data_set_blocks_are_read(make_shards, monkeypatch):
    """Its first and last tokens are in them; a change between two blocks is not seen."""
    monkeypatch.setattr(module, "_BLOCKS", 4)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 20)
    reference, seen = fingerprint(make_shards(DOCUMENTS)), []
    everything = np.concatenate(DOCUMENTS)
    cuts = np.cumsum([len(document) for document in DOCUMENTS])[:-1]
    for at in range(len(everything)):
        other = everything.copy()
        other[at] += 1
        seen.append(fingerprint(make_shards(np.split(other, cuts), name="x")) != reference)
    assert np.flatnonzero(seen).tolist() == [
        start + i for start in (0, 56, 113, 170) for i in range(10)
    ]
