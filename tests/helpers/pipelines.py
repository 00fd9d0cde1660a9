"""Build tokenizers with the parts of LLaMA's, Mistral's, Gemma's, GPT-2's and T5's from a text.

Each is trained by the library that reads it (`tokenizers` or `sentencepiece`). The parts are those
of the published tokenizer.json files; only the vocabularies are small.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on the mat.",
    "It is what it is: the cat sat there, we'll see. She said it's done in 12345 days!",
    "def f(x):\n    return the(x) + 1\n",
] * 8
SPLIT = (  # LLaMA 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _template(single: str, token: str, i: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[(token, i)])


def _of_bytes_and_spaces() -> Tokenizer:
    """A BPE whose unknown characters become bytes, and whose spaces become U+2581."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = dict.fromkeys([*first, "\u2581", *sorted(model["vocab"], key=model["vocab"].get)])
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in first[:3]])
    made.post_processor = _template("<s> $A", "<s>", 1)
    replaced = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence(
        [replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def llama2() -> tuple[Tokenizer, str]:
    """Spaces by normalizers, as in LLaMA 2's and Mistral 7B's first files."""
    made = _of_bytes_and_spaces()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made, "</s>"


def mistral() -> tuple[Tokenizer, str]:
    """Spaces by Metaspace, as in Mistral's later files."""
    made = _of_bytes_and_spaces()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made, "</s>"


def gemma() -> tuple[Tokenizer, str]:
    """Runs of spaces are tokens that its file lists as added, as all that its authors defined."""
    model = json.loads(_of_bytes_and_spaces().to_str())
    runs = ["\u2581" * n for n in (2, 4)]
    for run in runs:
        model["model"]["vocab"].setdefault(run, len(model["model"]["vocab"]))
        half = [run[: len(run) // 2]] * 2
        model["model"]["merges"] = [half] + [x for x in model["model"]["merges"] if x != half]
    made = Tokenizer.from_str(json.dumps(model))
    made.add_tokens([AddedToken(run, normalized=False, special=False) for run in runs])
    made.normalizer = normalizers.Replace(" ", "\u2581")
    replaced = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    return made, "</s>"


def _byte_level(names: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=names, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def llama3() -> tuple[Tokenizer, str]:
    made = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, alone])
    begin = _template("<|begin_of_text|> $A", "<|begin_of_text|>", 0)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return made, "<|end_of_text|>"


def gpt2() -> tuple[Tokenizer, str]:
    made = _byte_level(["<|endoftext|>"])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made, "<|endoftext|>"


def t5() -> tuple[Tokenizer, str]:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False, initial_alphabet=list("你好😀é漢字"),
    )  # fmt: skip
    made.train_from_iterator(TEXT, trainer)
    made.post_processor = _template("$A </s>", "</s>", 1)
    return made, "</s>"


PIPELINES: dict[str, Callable[[], tuple[Tokenizer, str]]] = {
    made.__name__: made for made in (llama2, mistral, gemma, llama3, gpt2, t5)
}


def write_pipeline(name: str, folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json, and return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    made, end = PIPELINES[name]()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    return folder / "tokenizer.json"


def write_sentencepiece(path: Path, **options: Any) -> Path:
    """Train a SentencePiece model as LLaMA's (byte fallback, `</s>`), and return `path`."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=340,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, num_threads=1, minloglevel=3, **{"model_type": "bpe"} | options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path
