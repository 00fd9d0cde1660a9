"""Convert a SentencePiece model, such as Llama's tokenizer.model, to a tokenizer.json.

A BPE model of SentencePiece gives each piece (token) a score. It has no list of merges. At each
step, the model joins the two adjacent pieces whose concatenation is the piece with the highest
score. Therefore the list of merges must contain every way to divide a piece into two pieces. The
merges are sorted by the score of the piece that they form, the highest score first.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from megatron.data.tokenizers.fast_bpe import DIFFICULT_TEXTS
from megatron.data.tokenizers.sentencepiece import SPMTokenizer

_SPACE = "\u2581"


def write_tokenizer_json(model: Path, *, begins: bool) -> bool:
    """Convert a SentencePiece file to a tokenizer.json in the same folder.

    The two tokenizers are compared on texts that are difficult to tokenise. If the token ids of a
    text differ, nothing is written.

    Args:
        model: The SentencePiece file.
        begins: Whether the new tokenizer puts the token `<s>` before each text.

    Returns:
        Whether the tokenizer.json was written.

    Raises:
        TokenizerError: The file is damaged or has no token that ends a document.
        TokenizerError: The library `sentencepiece` is missing.
    """
    given = SPMTokenizer(model)
    from sentencepiece import SentencePieceProcessor  # which SPMTokenizer has found

    pieces = SentencePieceProcessor(model_file=str(model))
    names: list[str] = pieces.id_to_piece(list(range(given.vocab_size)))
    ids = {name: i for i, name in enumerate(names)}
    merges = [
        (name[:at], name[at:])
        for name in sorted(names, key=lambda name: -pieces.get_score(ids[name]))
        for at in range(1, len(name))
        if name[:at] in ids and name[at:] in ids
    ]
    unknown, begin = names[pieces.unk_id()], pieces.bos_id()
    made = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    made.normalizer = normalizers.Sequence(spaces)
    read = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)])
    control = (name for i, name in enumerate(names) if pieces.is_control(i))
    made.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    if begins and begin >= 0:
        made.post_processor = processors.TemplateProcessing(
            f"{names[begin]} $A", special_tokens=[(names[begin], begin)]
        )
    for text in DIFFICULT_TEXTS:
        if made.encode(text, add_special_tokens=False).ids != given.encode(text).tolist():
            return False
    made.save(str(model.with_name("tokenizer.json")))
    described = model.with_name("tokenizer_config.json")
    if not described.exists():
        described.write_text(json.dumps({"eos_token": names[given.eod]}) + "\n")
    return True
