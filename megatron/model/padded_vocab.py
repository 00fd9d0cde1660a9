"""Pad the vocabulary, so that tensor-parallel ranks have equal parts of the embedding."""


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return the smallest multiple of `divisible_by` that is at least `vocab_size`."""
    # GPT-NeoX multiplies `divisible_by` by the number of tensor-parallel ranks. Our configs use the
    # least common multiple instead, so that the size rarely depends on the number of ranks.
    return -(-vocab_size // divisible_by) * divisible_by
