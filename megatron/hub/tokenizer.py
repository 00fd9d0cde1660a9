"""Write a tokenizer as the files from which `transformers.AutoTokenizer` loads it."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from megatron.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, fault_in_file
from megatron.data.tokenizers.bpe import HFTokenizer
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.data.tokenizers.fast_bpe import DIFFICULT_TEXTS, byte_of_symbol
from megatron.engine.errors import HubError

TEMPLATE = "chat_template.jinja"
"""The name of the file with a tokenizer's chat template."""


class OtherTokensError(HubError):
    """transformers loads another tokenizer from an export."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer as files for the library transformers.

    Raises:
        HubError: The tokenizer cannot be exported.
        OtherTokensError: From the written files, transformers gets different token ids.
    """
    # Texts of a batch are padded at the start, by end-of-document tokens.
    if isinstance(tokenizer, HFTokenizer):
        backend = tokenizers.Tokenizer.from_str(tokenizer.reference.to_str())
        end = str(backend.id_to_token(tokenizer.eod))
        # If this token is not among the added ones, its characters in a text are ordinary text.
        ordinary = tokenizer.eod not in backend.get_added_tokens_decoder()
    elif isinstance(tokenizer, ByteLevelTokenizer):
        backend, end = _of_bytes(tokenizer)
        ordinary = True
    else:
        raise HubError(
            f"tokenizer_type: {tokenizer.name} cannot be exported; ByteLevelTokenizer, "
            "CharLevelTokenizer, GPT2BPETokenizer and HFTokenizer can"
        )
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name in all versions of transformers
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": ordinary,
    }
    if added := backend.get_added_tokens_decoder().keys() & set(tokenizer.begin):
        described["bos_token"] = backend.id_to_token(added.pop())
    # Not by `backend.save`, which raises a bare Exception without the path if the disk is full.
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    _check(tokenizer, folder)


def chat_template(vocab_file: str | None) -> str | None:
    """Return the chat template beside a tokenizer.json, or None if there is none.

    Raises:
        TokenizerError: The files beside the tokenizer.json cannot be read.
    """
    if vocab_file is None:
        return None
    with fault_in_file(f"{vocab_file}: the chat template beside it cannot be read"):
        files = [Path(vocab_file).with_name(x) for x in (TEMPLATE, "tokenizer_config.json")]
        template, described = (x.read_text("utf-8") if x.is_file() else None for x in files)
        found = json.loads(described or "{}")
        template = template or found.get("chat_template")  # where transformers 4 wrote it
        if not isinstance(template, str):
            return None
        # The export's end of a text is that of a document, and it may have no token of the begin.
        tokens = {key: found.get(key) for key in ("bos_token", "eos_token") if key in template}
        texts = {key: x["content"] if isinstance(x, dict) else x for key, x in tokens.items()}
        sets = [f"{{% set {key} = {json.dumps(x)} %}}" for key, x in texts.items() if x]
        return "".join([*sets, template])


def _of_bytes(tokenizer: ByteLevelTokenizer) -> tuple[tokenizers.Tokenizer, str]:
    """Return a tokenizer whose tokens are single bytes, and its end-of-document token as text."""
    ids = byte_of_symbol()
    end = {byte: symbol for symbol, byte in ids.items()}.get(tokenizer.eod, END_OF_DOCUMENT)
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids | {end: tokenizer.eod}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend, end


def _check(tokenizer: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    for text in DIFFICULT_TEXTS:
        ids = [*tokenizer.begin, *tokenizer.encode(text)]
        found = theirs(text)["input_ids"]  # a template may also end the text
        if found[: len(ids)] != ids or {*found[len(ids) :]} - {tokenizer.eod}:
            raise OtherTokensError(
                f"the exported {tokenizer.name} gives other ids to {text[:60]!r}, so there is "
                "no export"
            )
    if (theirs.eos_token_id, theirs.pad_token_id) != (tokenizer.eod, tokenizer.eod):
        raise HubError(f"the exported {tokenizer.name} has another end-of-document token")
