"""Write text to every kind of archive, with the libraries that wrote the published corpora."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path

import lm_dataformat

WORDS = [
    *("the", "kernel", "of", "naïve", "distance", "—", "α,", "β;", "x_i", "=", "1.5e-3\n\tdef"),
    *("f():", "return", "{'日本':", "None}"),
]


def texts(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    """Return documents of many lengths, some of them empty."""
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=rng.randrange(1, longest))) for _ in range(count)]
    return ["" if rng.random() < 0.05 else text for text in made]


def write_jsonl(path: Path, documents: list[str], **meta: str) -> Path:
    records = ({"text": text, "meta": meta} for text in documents)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lmd_archive(folder: Path, documents: list[str], commits: int = 1) -> list[Path]:
    """Write .jsonl.zst files with lm_dataformat, one for each commit."""
    archive = lm_dataformat.Archive(str(folder))
    step = -(-len(documents) // commits)
    for start in range(0, len(documents), step):
        for text in documents[start : start + step]:
            archive.add_data(text, meta={"url": "x"})
        archive.commit(f"part{start:06}")
    archive.fh.close()
    return sorted(folder.glob("*.jsonl.zst"))


def tar_of(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar (gzipped if its name ends in .gz), with a folder entry as in published ones."""
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        folder = tarfile.TarInfo("papers")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def openwebtext2(folder: Path, documents: list[str]) -> Path:
    """Write openwebtext2.jsonl.zst.tar, a tar of lm_dataformat archives."""
    parts = lmd_archive(folder / "parts", documents, commits=3)
    members = [(part.name, part.read_bytes()) for part in parts]
    return tar_of(folder / "openwebtext2.jsonl.zst.tar", members)


def github(folder: Path, documents: list[str]) -> Path:
    """Write github_small.jsonl.zst, an lm_dataformat archive."""
    [part] = lmd_archive(folder / "parts", documents)
    return part.rename(folder / "github_small.jsonl.zst")


def arxiv(folder: Path, documents: list[str]) -> Path:
    """Write a .tar.gz with one text file per paper."""
    members = [(f"papers/{i:04}.tex", text.encode()) for i, text in enumerate(documents)]
    name = "2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz"
    return tar_of(folder / name, members)


LAYOUTS = {"openwebtext2": openwebtext2, "github": github, "arxiv": arxiv}


def gz(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def make_faults(folder: Path) -> dict[str, Path]:
    """Write one input for each kind of fault, and return fault -> path."""
    good = b'{"text": "fine"}\n'
    files = {
        "json": good * 3 + b'{"text": "cut\n' + good,
        "key": good + b'{"body": "b"}\n',
        "utf8": good + b'{"text": "caf\xe9"}\n' + good,
        "empty": b"",
        "blank": b"\n\n",
    }
    made = {}
    for name, data in files.items():
        made[name] = folder / f"{name}.jsonl"
        made[name].write_bytes(data)
    zst = github(folder, texts(300))
    made["zst"] = folder / "cut.jsonl.zst"
    made["zst"].write_bytes(zst.read_bytes()[:-200])
    tar = openwebtext2(folder / "owt", texts(300))
    made["tar"] = folder / "cut.jsonl.zst.tar"
    made["tar"].write_bytes(tar.read_bytes()[:-12000])
    return made
