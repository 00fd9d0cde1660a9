"""A fingerprint of a data set, by which a resumed run checks that the tokens have not changed.

In a data set of up to 64 MiB, all tokens are hashed. In a larger data set, hashing all tokens would
delay each start by minutes, so only 256 blocks of 256 KiB are hashed. The blocks are spread evenly
over the data set. The lengths of all documents are always hashed. Therefore the fingerprint changes
if the text is replaced, reordered or tokenised with another tokenizer. In a large data set, a
change of a few tokens outside the blocks is not noticed.
"""

import hashlib

import numpy as np

from megatron.data.shards.interface import Shards

_BLOCKS = 256
_BLOCK_BYTES = 1 << 18


def fingerprint(shards: Shards) -> str:
    """Return a hash (32 hex digits) of the documents of `shards`, in order.

    The hash does not depend on how the documents are divided into shards.
    """
    found = hashlib.sha256(shards.dtype.name.encode())
    found.update(np.ascontiguousarray(shards.sizes).data)
    block, total = _BLOCK_BYTES // shards.dtype.itemsize, len(shards.tokens)
    if total <= _BLOCKS * block:
        starts = range(0, total, block)
    else:
        starts = np.linspace(0, total - block, _BLOCKS).astype(np.int64).tolist()
    for start in starts:
        found.update(np.ascontiguousarray(shards.tokens[start : start + block]).data)
    return found.hexdigest()[:32]
