"""Test which text the far-swap measure puts in place of a sequence's far text."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.evaluation.suite.context import of_other_documents


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
