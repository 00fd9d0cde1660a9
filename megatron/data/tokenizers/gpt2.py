"""Hashes of the vocabulary and the merges that OpenAI published for GPT-2.

If a tokenizer's files have these hashes, training starts sooner, because the merges need not be
parsed. Faster libraries can then encode texts (see `fast_bpe.py`).
"""

import hashlib
import json

FILE_HASHES = {
    "gpt2-vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "gpt2-merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""SHA-256 (hex) of GPT-2's two published files. The keys are GPT-NeoX's names of the files."""

FINGERPRINT = "946de44b22d618abd60a005e2fbf0b4d17f68426cf09ab6f2dd5a6733207dd83"
"""The value of `GPT2BPETokenizer.fingerprint()` for these two files, stored to save time."""

# SHA-256 of the JSON list of GPT-2's 50,000 merges.
_MERGES_HASH = "980ca8f2d4b0964c87a762e901db0656ce92d3f1ecd940b25ba97463da5c68fa"


def are_published_files(vocabulary: bytes, merges: bytes) -> bool:
    """Return whether these are the contents of GPT-2's vocab.json and merges.txt."""
    found = [hashlib.sha256(content).hexdigest() for content in (vocabulary, merges)]
    return found == list(FILE_HASHES.values())


def are_published_merges(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> bool:
    """Return whether a tokenizer has GPT-2's merges and the token ids that belong to them."""
    # In GPT-2, the token that merge i creates has the id 256 + i.
    digest = hashlib.sha256(json.dumps(merges).encode()).hexdigest()
    return digest == _MERGES_HASH and all(
        vocabulary["".join(pair)] == 256 + i for i, pair in enumerate(merges)
    )
