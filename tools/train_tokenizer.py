"""Train a byte-level BPE tokenizer on text, for `tokenizer_type: HFTokenizer`.

    python tools/train_tokenizer.py builtin:python-stdlib --size 2048 --out data/code.json
    python tools/train_tokenizer.py texts --size 8192 --out data/texts.json

TEXT is a file, a folder of text files, or a builtin corpus. The same text and size give the same
file. The vocabulary contains the 256 bytes and the token that ends a document.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron import entry
from megatron.config.builtin import CORPUS
from megatron.data.corpora.python_stdlib import stdlib_files, stdlib_root
from megatron.data.errors import DataError
from megatron.data.prepare.compression import COMPRESSIONS
from megatron.data.prepare.sources import kind_of
from megatron.data.tokenizers.base import END_OF_DOCUMENT
from megatron.files import write_text

SMALLEST = 257


def train_tokenizer(texts: Sequence[str], size: int, out: Path) -> int:
    """Train a tokenizer on `texts`, write its tokenizer.json to `out`, and return its size.

    Args:
        texts: Paths of text files and folders, or names of builtin corpora.
        size: The number of tokens in the vocabulary. A short text gives fewer.
        out: The path of the file to write.

    Raises:
        DataError: There is no text, a file is not plain text, or `size` is too small.
    """
    import tokenizers

    if size < SMALLEST:
        raise DataError(f"--size {size}: the bytes and {END_OF_DOCUMENT} need {SMALLEST}")
    paths: list[Path] = []
    for text in texts:
        if text == CORPUS:
            paths += [stdlib_root() / file for file in stdlib_files()]
        else:
            root = Path(text)
            paths += sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    if not paths:
        raise DataError(f"{', '.join(texts)}: no text files; name a file or a folder of them")
    packed = [p for p in paths if p.suffix in COMPRESSIONS or kind_of(p.name) not in (None, "text")]
    if packed:
        raise DataError(f"{packed[0]}: not plain text; write its texts into .txt files first")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    contents = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    found.train_from_iterator(contents, trainer)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, found.to_str(pretty=True))
    return found.get_vocab_size()


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Train the tokenizer that the command line describes, and return the exit code."""
    parser = entry.parser(__doc__)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--size", type=int, required=True, help="number of tokens")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args(argv)
    size = train_tokenizer(args.texts, args.size, args.out)
    print(f"{args.out}: {size:,} tokens")
    return 0


if __name__ == "__main__":
    entry.run(main)
