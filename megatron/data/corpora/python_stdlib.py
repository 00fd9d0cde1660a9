"""Corpora that need no download: `python-stdlib`, the sources of the interpreter's library.

Documents are the library's `.py` files, about 10 MB. Left out are tests, tables of data
(`pydoc_data/topics.py`, `encodings/`), installed packages, and files that differ between machines.
`split` divides the documents in their order, so they are ordered by a hash of their path: each
split is then a fair mixture, and the order is the same everywhere. The data set's name contains the
Python version and the tokenizer's fingerprint.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

from megatron.data.errors import CorpusError, ShardError
from megatron.data.locks import one_at_a_time
from megatron.data.prepare.run import PrepareOptions, write_shards
from megatron.data.prepare.sources import Source
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.suggest import nearest

PREFIX = "builtin:"  # a data_path that names a corpus starts with it
NAMES = ("python-stdlib",)

_TESTS = {"idle_test", "test", "tests"}
_PACKAGES = {"dist-packages", "site-packages"}
_SKIPPED_FOLDERS = {"__pycache__", "encodings", "lib-dynload"} | _TESTS | _PACKAGES
# The first describes the machine, the second is the distribution's, the third a table of data.
_SKIPPED_FILES = ("_sysconfigdata*.py", "sitecustomize.py", "pydoc_data/topics.py")


def resolve_data_path(
    data_path: str | tuple[str, ...], data_dir: str | os.PathLike, tokenizer: Tokenizer
) -> str | tuple[str, ...]:
    """The shards' prefix: prepares a corpus ("builtin:NAME"); returns any other path unchanged."""
    if isinstance(data_path, str) and data_path.startswith(PREFIX):
        return prepare_builtin(data_path[len(PREFIX) :], data_dir, tokenizer)
    return data_path


def prepare_builtin(name: str, data_dir: str | os.PathLike, tokenizer: Tokenizer) -> str:
    """Tokenise corpus `name` into `data_dir` unless that is done; return the shards' prefix.

    If several processes call this at once, one does the work, with a progress bar, and the others
    wait.

    Raises:
        CorpusError: if the name is unknown.
    """
    if name not in NAMES:
        near = nearest(name, NAMES)
        hint = f"did you mean {PREFIX}{near}? " if near else ""
        known = ", ".join(PREFIX + each for each in NAMES)
        raise CorpusError(f"data_path: unknown corpus {PREFIX}{name}; {hint}known: {known}")
    if Path(data_dir).is_file():
        raise CorpusError(f"data_dir: {data_dir} is a file; name a folder for the tokens")
    key = f"{platform.python_version()}-{tokenizer.name}-{tokenizer.fingerprint()[:8]}"
    prefix = Path(data_dir) / name / f"{name}-{key}_text_document"
    if not _is_ready(prefix, tokenizer):
        with one_at_a_time(prefix.parent / ".lock"):
            if not _is_ready(prefix, tokenizer):
                _build_python_stdlib(prefix, tokenizer)
    return str(prefix)


def stdlib_files() -> list[Path]:
    """The files of the corpus, relative to the library's folder, in the order of its documents."""
    root = stdlib_root()
    chosen = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        sources = [Path(folder, name).relative_to(root) for name in fnmatch.filter(files, "*.py")]
        chosen += [path for path in sources if not any(map(path.match, _SKIPPED_FILES))]
    return sorted(chosen, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def stdlib_root() -> Path:
    """Folder of the interpreter's library; in a virtual environment, of the base interpreter's."""
    return Path(sysconfig.get_paths()["stdlib"])


def _build_python_stdlib(prefix: Path, tokenizer: Tokenizer) -> None:
    """Encode the library's sources into the shards `prefix`."""
    root, files = stdlib_root(), stdlib_files()
    if not files:
        raise CorpusError(
            f"{root}: holds no .py files (is the library zipped?); prepare "
            "another corpus with prepare_data.py --input"
        )
    paths = [str(root / file) for file in files]
    source = Source(str(root), "text", sum(map(os.path.getsize, paths)), paths)
    write_shards(
        [source],
        [prefix],
        tokenizer,
        PrepareOptions(on_error="skip"),  # a few Python files declare another encoding
        about={"corpus": "python-stdlib", "python": platform.python_version()},
        label="tokenising python-stdlib",
    )


def _is_ready(prefix: Path, tokenizer: Tokenizer) -> bool:
    """Whether a complete data set of this tokenizer exists."""
    try:
        manifest = read_manifest(prefix)
        ShardReader(prefix)
    except ShardError:
        return False
    return manifest is not None and manifest["tokenizer_fingerprint"] == tokenizer.fingerprint()
