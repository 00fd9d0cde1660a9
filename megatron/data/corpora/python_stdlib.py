"""Build the corpus `python-stdlib` from Python's standard library, without a download.

`python-stdlib` is the only built-in corpus. The documents are the `.py` files of the standard
library, about 10 MB in total. The selection leaves out tests, large data tables
(`pydoc_data/topics.py`, `encodings/`), installed packages, files that differ between machines, and
files that mostly repeat another file. The documents are ordered by a hash of their path. This order
is the same on every machine. The config key `split` divides the documents into consecutive ranges.
Because of the hashed order, each range is a random sample of the library. The file names of the
shards contain the version of Python, a version number of this selection of files, and the
tokenizer's fingerprint.
"""

import fnmatch
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

from megatron.config.builtin import CORPUS, PREFIX
from megatron.data.errors import CorpusError, ShardError
from megatron.data.locks import one_at_a_time
from megatron.data.prepare.sources import Source
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.suggest import did_you_mean

_TESTS = {"idle_test", "test", "tests"}
_PACKAGES = {"dist-packages", "site-packages"}
_SKIPPED_FOLDERS = {"__pycache__", "encodings", "lib-dynload"} | _TESTS | _PACKAGES
# The files of the first pattern differ between machines, and those of the second pattern between
# Linux distributions. The third file is a large data table.
_SKIPPED_FILES = ("_sysconfigdata*.py", "sitecustomize.py", "pydoc_data/topics.py")
# Half of the five-word sequences of each of these files are also in one other file. A text that
# occurs in two splits would be measured after it was trained on.
_REPEATED_FILES = """
__phello__/*.py bz2.py chunk.py distutils/msvccompiler.py importlib/resources/_itertools.py
lib2to3/fixes/fix_intern.py lib2to3/pgen2/__init__.py sre_compile.py sre_constants.py
venv/__main__.py xml/etree/__init__.py xmlrpc/__init__.py"""
_REVISION = 2  # increase it when other files are selected, so that shards are made again


def resolve_data_path(
    data_path: str | tuple[str, ...] | None, data_dir: str | os.PathLike, tokenizer: Tokenizer
) -> str | tuple[str, ...]:
    """Return `data_path`, but replace "builtin:NAME" by the path of a token shard.

    The shard contains the built-in corpus NAME, and is created if it does not exist. The returned
    path of the shard has no suffix .bin or .idx.

    Raises:
        CorpusError: `data_path` is None, or there is no built-in corpus NAME.
    """
    if data_path is None:
        raise CorpusError("data_path is not set; name a shard prefix or builtin:python-stdlib")
    if isinstance(data_path, str) and data_path.startswith(PREFIX):
        return prepare_builtin(data_path, data_dir, tokenizer)
    return data_path


def prepare_builtin(corpus: str, data_dir: str | os.PathLike, tokenizer: Tokenizer) -> str:
    """Tokenise the built-in corpus `corpus` into `data_dir`, unless its token shard exists.

    If several processes call this function at once, one process writes the shard and shows a
    progress bar. The other processes wait.

    Returns:
        The path of the shard without .bin or .idx.

    Raises:
        CorpusError: There is no built-in corpus of this name, or `data_dir` is a file.
    """
    if corpus != CORPUS:
        hint = did_you_mean(corpus, [CORPUS], cutoff=0.8)
        raise CorpusError(f"data_path: unknown corpus {corpus}; {hint}known: {CORPUS}")
    if Path(data_dir).is_file():
        raise CorpusError(f"data_dir: {data_dir} is a file; name a folder for the tokens")
    key = f"{platform.python_version()}-r{_REVISION}-{tokenizer.name}-{tokenizer.fingerprint()[:8]}"
    name = corpus.removeprefix(PREFIX)
    prefix = Path(data_dir) / name / f"{name}-{key}_text_document"
    if not _is_ready(prefix, tokenizer):
        with one_at_a_time(prefix.parent / ".lock"):
            if not _is_ready(prefix, tokenizer):
                _build_python_stdlib(prefix, tokenizer)
    return str(prefix)


def stdlib_files() -> list[Path]:
    """Return the files of the built-in corpus `python-stdlib`, in the order of its documents.

    The paths are relative to the folder of the standard library.
    """
    root = stdlib_root()
    chosen = []
    unwanted = (*_SKIPPED_FILES, *_REPEATED_FILES.split())
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        sources = [Path(folder, name).relative_to(root) for name in fnmatch.filter(files, "*.py")]
        chosen += [path for path in sources if not any(map(path.match, unwanted))]
    return sorted(chosen, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def stdlib_root() -> Path:
    """Return the folder of Python's standard library, even from within a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def _build_python_stdlib(prefix: Path, tokenizer: Tokenizer) -> None:
    """Tokenise Python's standard library, and write the shard whose prefix is `prefix`."""
    root, files = stdlib_root(), stdlib_files()
    if not files:
        raise CorpusError(
            f"{root}: holds no .py files (is the library zipped?); prepare "
            "another corpus with prepare_data.py --input"
        )
    paths = [str(root / file) for file in files]
    source = Source(str(root), "text", sum(map(os.path.getsize, paths)), paths)
    Preparation(
        [source],
        [prefix],
        tokenizer,
        on_error="skip",  # a few Python files declare another encoding
        about={"corpus": "python-stdlib", "python": platform.python_version()},
        label="tokenising python-stdlib",
    ).run()


def _is_ready(prefix: Path, tokenizer: Tokenizer) -> bool:
    """Return whether `prefix` names a complete shard that was made with `tokenizer`."""
    try:
        manifest = read_manifest(prefix)
        ShardReader(prefix)
    except ShardError:
        return False
    return manifest is not None and manifest["tokenizer_fingerprint"] == tokenizer.fingerprint()
