"""Pad the vocabulary, so that tensor-parallel ranks have equal parts of the embedding."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return the smallest multiple of `divisible_by` that is at least `vocab_size`.

    GPT-NeoX multiplies `divisible_by` by `model_parallel_size`, so its padded vocabulary depends on
    the number of tensor-parallel ranks. When this project loads a config, it takes the least
    common multiple of `divisible_by` and the number of these ranks instead. The padded vocabulary
    is therefore usually the same for any number of ranks.
    """
    return -(-vocab_size // divisible_by) * divisible_by
