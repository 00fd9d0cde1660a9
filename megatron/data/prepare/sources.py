"""Find the sources of a preparation run in files, folders and data sets of the Hugging Face hub.

| kind | input | documents |
|---|---|---|
| jsonl | .jsonl .json .ndjson | each line, which is a JSON object or string |
| tar | .tar .tgz | each record of its jsonl files, and each of its other files |
| dat | .dat, an archive of lm_dataformat | each document of the archive |
| text | .txt .text .md .rst .tex .py .html .xml | the complete file |
| zip | .zip | as for tar |
| parquet | .parquet | each row |
| hub | `hub:ID[:SPLIT[:CONFIG]]`, or a folder that the `datasets` library wrote | each row |

One of the suffixes .gz, .zst, .xz and .bz2 may follow the suffix in the table, except after .zip
and .parquet. If an input is a folder, all files in the folder except hidden files and `__pycache__`
are read, in the order of their paths. If the suffix of a file in a folder is unknown, the file has
the kind text. Consecutive text files form one source. A folder must not contain a link that leads
out of the folder, because such a link could add any file of the machine to the data.
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.data.errors import CorpusError
from megatron.data.prepare.compression import COMPRESSIONS

HUB = "hub:"
_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "tar": (".tar", ".tgz"),
    "dat": (".dat",),
    "text": (".txt", ".text", ".md", ".rst", ".tex", ".py", ".html", ".xml"),
    "zip": (".zip",),
    "parquet": (".parquet",),
}
KINDS = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes}
_RANDOM_ACCESS = ("zip", "parquet")  # these files cannot be compressed as a whole
_ARROW = ("dataset_info.json", "dataset_dict.json")  # the `datasets` library writes these files
_IGNORED = ("__pycache__", "current_chunk_incomplete")  # lm_dataformat leaves the second one behind


@dataclass
class Source:
    """One input of a preparation run.

    Attributes:
        path: A file, a folder, or `hub:ID[:SPLIT[:CONFIG]]`.
        kind: One of "jsonl", "tar", "dat", "text", "zip", "parquet" and "hub".
        size: The number of bytes, or 0 if it is unknown.
        paths: The files of the source in order, if its kind is text. Otherwise an empty list.
    """

    path: str
    kind: str
    size: int = 0
    paths: list[str] = field(default_factory=list)

    def identity(self) -> list:
        """Return [path, kind, hash], which identifies the input and its present state.

        The hash covers the names, sizes and modification times of the input's files.
        """
        found, paths = hashlib.sha256(), self.paths or [self.path]
        if os.path.isdir(self.path) and not self.paths:  # then `datasets` wrote this folder
            paths = sorted(str(path) for path in Path(self.path).rglob("*"))
        for path in paths:
            stat = os.stat(path) if os.path.exists(path) else None
            line = f"{path} {stat and (stat.st_size, stat.st_mtime_ns)}\n"
            found.update(line.encode("utf-8", "replace"))
        return [self.path, self.kind, found.hexdigest()]


def kind_of(name: str) -> str | None:
    """Return the kind of the file `name`, such as "jsonl", or None if its suffix is unknown."""
    path = Path(name.lower())
    compressed = path.suffix in COMPRESSIONS
    kind = KINDS.get(path.with_suffix("").suffix if compressed else path.suffix)
    return None if compressed and kind in _RANDOM_ACCESS else kind


def find_sources(inputs: Iterable[str | os.PathLike]) -> list[Source]:
    """Return the sources that `inputs` name, in the order of `inputs`.

    Args:
        inputs: Paths of files or folders, glob patterns, and `hub:ID[:SPLIT[:CONFIG]]`.

    Raises:
        CorpusError: An input is missing, is empty, has an unknown kind, or is named twice. The
            error message lists all such inputs.
    """
    sources: list[Source] = []
    faults: list[str] = []
    for given in (os.fspath(each) for each in inputs):
        if given.startswith(HUB):
            sources.append(Source(given, "hub"))
            continue
        matches = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            why = "matches no file" if set(given) & set("*?[") else "no such file"
            faults.append(f"{given}: {why}")
        for path in matches:
            if os.path.isdir(path):
                _add_folder(path, sources, faults)
            elif kind := kind_of(path):
                _add(sources, path, kind, faults)
            else:
                suffix = Path(path).suffix or "(no suffix)"
                faults.append(
                    f"{path}: unknown kind {suffix!r}; give .jsonl, .txt or .parquet files, .tar, "
                    ".zip or .dat.zst archives, or a folder of text files"
                )
    files = (os.path.realpath(p) for source in sources for p in source.paths or [source.path])
    for path in [each for each, times in Counter(files).items() if times > 1]:
        faults.append(f"{path}: is named twice, which doubles its documents; name it once")
    if faults:
        raise CorpusError("\n".join(faults))
    return sources


def _add(sources: list[Source], path: str, kind: str, faults: list[str]) -> None:
    size = os.path.getsize(path)
    if not os.path.isfile(path):
        faults.append(f"{path}: is a pipe, socket or device; write its content into a file")
    elif size == 0 and kind != "text":  # a text file may be empty, as __init__.py is
        faults.append(f"{path}: is empty")
    elif kind == "text" and sources and sources[-1].kind == "text":
        sources[-1].paths.append(path)
        sources[-1].size += size
    else:
        sources.append(Source(path, kind, size, [path] if kind == "text" else []))


def _add_folder(folder: str, sources: list[Source], faults: list[str]) -> None:
    if any(os.path.exists(os.path.join(folder, name)) for name in _ARROW):
        sources.append(Source(folder, "hub"))
        return
    # By default, `os.walk` leaves folders that it cannot read out silently.
    found, unreadable = list[str](), list[OSError]()
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder, onerror=unreadable.append):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in _IGNORED]
        names = [n for n in files if not n.startswith(".") and n not in _IGNORED]
        found += [os.path.join(parent, name) for name in names]
        for path in (os.path.join(parent, name) for name in folders + names):
            target = os.path.realpath(path)
            if os.path.islink(path) and os.path.commonpath([root, target]) != root:
                faults.append(
                    f"{path}: is a link out of the folder, to {target}; remove it or give it alone"
                )
    # A link to another file of the folder is left out.
    files = {os.path.realpath(p): p for p in sorted(found, key=os.path.islink, reverse=True)}
    found = sorted(path for path in files.values() if os.path.exists(path))
    faults += [f"{error.filename}: {error.strerror}" for error in unreadable]
    if not found and not unreadable:
        faults.append(f"{folder}: a folder without files")
    for path in found:
        _add(sources, path, kind_of(path) or "text", faults)
