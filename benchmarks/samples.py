"""Time the building of a sample index and the reading of samples, against the published code.

    python benchmarks/samples.py --published GPT_NEOX --out benchmarks/results/samples

GPT_NEOX is a checkout of EleutherAI's gpt-neox, or of the published KERPLE code. Its helper
`megatron/data/helpers.cpp` is compiled in a temporary folder with g++ and the headers in torch, and
its data set is imported from the checkout. Nothing of it is part of this project. Without
`--published`, the times are compared with short plain code in this file.

All sides get the same documents, whose lengths are drawn from a log-normal distribution, and all
results are compared bit by bit. Each round times every side once, and medians are compared. Memory
is the peak that `tracemalloc` sees, beyond the result. OUT.md, OUT.csv and OUT.png are written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.report import bars, facts, write
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.index import cut_samples
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter

SIDES = OURS, PLAIN, PUBLISHED = "this project", "plain numpy", "published"
Sides = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", type=Path, help="a checkout to compare with")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the index")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--read-tokens", type=int, default=100_000_000, help="in the shard read")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=1000, help="read in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="write OUT.md, OUT.csv and OUT.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        theirs = load_published(options.published, Path(folder)) if options.published else None
        rows = index_rows(options, theirs) + read_rows(options, theirs, Path(folder))
    about = facts("benchmarks/samples.py")
    about.append(
        f"index of {options.documents:,} documents with {options.tokens:,} tokens; reading "
        f"batches of {options.batch} from {options.read_tokens:,} tokens; length "
        f"{options.length}; {options.rounds} interleaved rounds, medians; results equal bit by bit"
    )
    write(options.out, "Sample index and reads", about, rows, draw)


def timed(sides: Sides, rounds: int, **row: Any) -> list[dict]:
    """Time each side in each round, and return one row of the table for each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):  # interleaved: a slow minute hits every side
        for name, function in sides.items():
            begun = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begun)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    other = PUBLISHED if PUBLISHED in sides else PLAIN
    return [
        {
            **row,
            "code": name,
            "ms": round(median[name] * 1e3, 2),
            "fastest_ms": round(min(seconds[name]) * 1e3, 2),
            f"ms_divided_by_{other.split()[0]}": round(median[name] / median[other], 3),
        }
        for name in sides
    ]


# ---- the index -------------------------------------------------------------------------------


def lengths(documents: int, tokens: int, rng: np.random.RandomState) -> np.ndarray:
    """Return the lengths of documents, int32 [documents], with the sum `tokens`."""
    weights = rng.lognormal(0, 1, documents)
    ends = np.rint(np.cumsum(weights / weights.sum()) * tokens).astype(np.int64)
    ends[-1] = tokens
    return np.diff(ends, prepend=0).astype(np.int32)


def plain_index(sizes: np.ndarray, doc_idx: np.ndarray, length: int, tokens: int) -> np.ndarray:
    """Return what `cut_samples` returns, by one binary search over all documents."""
    ends = np.cumsum(sizes[doc_idx], dtype=np.int64)
    cuts = np.arange((tokens - 1) // length + 1) * length
    place = np.searchsorted(ends, cuts, side="right")
    place[0] = 0
    starts = ends[place] - sizes[doc_idx[place]]
    starts[0] = 0
    return np.stack([place, cuts - starts], axis=1).astype(np.int32)


def index_rows(options: argparse.Namespace, theirs: Published | None) -> list[dict]:
    rng = np.random.RandomState(1234)
    sizes = lengths(options.documents, options.tokens, rng)
    doc_idx = rng.permutation(options.documents).astype(np.int32)
    arguments = (sizes, doc_idx, options.length, options.tokens)
    sides: Sides = {
        OURS: lambda: cut_samples(*arguments),
        PLAIN: lambda: plain_index(*arguments),
    }
    if theirs:
        sides[PUBLISHED] = lambda: theirs.index(*arguments)
    expected = sides[OURS]()
    if not all(np.array_equal(expected, function()) for function in sides.values()):
        raise SystemExit("the indices differ")
    rows = timed(sides, options.rounds, task="sample index")
    for row in rows:
        extra = peak_bytes(sides[row["code"]]) - expected.nbytes
        # The helper's memory is outside Python, and it needs none beyond its result.
        known = row["code"] != PUBLISHED
        row["samples_per_s"] = round((len(expected) - 1) / row["ms"] * 1e3)
        row["extra_bytes_per_document"] = round(extra / options.documents, 1) if known else ""
    return rows


def peak_bytes(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- reading ---------------------------------------------------------------------------------


def plain_batch(data: TokenDataset, numbers: range) -> torch.Tensor:
    """Return a batch by plain code: documents joined for each sample, samples stacked."""
    index, shards, samples = data.index, data.shards, []
    for number in numbers:
        cut = index.shuffle_idx[number]
        (first, begin), (last, end) = index.sample_idx[cut], index.sample_idx[cut + 1]
        pieces = []
        for place in range(first, last + 1):
            document = index.doc_idx[place]
            start = shards.pointers[document] // shards.dtype.itemsize
            stop = start + (end + 1 if place == last else shards.sizes[document])
            pieces.append(shards.tokens[start + (begin if place == first else 0) : stop])
        samples.append(torch.from_numpy(np.concatenate(pieces).astype(np.int64)))
    return torch.stack(samples)


def read_rows(options: argparse.Namespace, theirs: Published | None, folder: Path) -> list[dict]:
    rng = np.random.RandomState(1234)
    sizes = lengths(max(1, options.read_tokens // 1000), options.read_tokens, rng)
    with ShardWriter(folder / "tokens", np.uint16) as writer:
        for part in np.array_split(sizes, max(1, len(sizes) // 1000)):
            writer.add_documents(rng.randint(0, 50257, part.sum()).astype(np.uint16), part)
    shards = ShardReader(folder / "tokens")
    data = TokenDataset(shards, (0, len(shards)), 0, options.length, 1234, "train")
    count = min(options.batches, (len(data) - 1) // options.batch)
    batches = [range(n * options.batch, (n + 1) * options.batch) for n in range(count)]
    readers: dict[str, Callable[[range], torch.Tensor]] = {
        OURS: lambda numbers: torch.from_numpy(data.batch(np.asarray(numbers))),
        PLAIN: lambda numbers: plain_batch(data, numbers),
    }
    if theirs:
        readers[PUBLISHED] = theirs.reader(folder / "tokens", data)
    for numbers in batches[:20]:
        expected = readers[OURS](numbers)
        if not all(torch.equal(expected, read(numbers)) for read in readers.values()):
            raise SystemExit("the samples differ")

    def all_batches(read: Callable[[range], torch.Tensor]) -> None:
        for numbers in batches:
            read(numbers)

    sides = {name: lambda read=read: all_batches(read) for name, read in readers.items()}
    rows = timed(sides, options.rounds, task="reading")
    for row in rows:
        row["samples_per_s"] = round(count * options.batch / row["ms"] * 1e3)
        row["extra_bytes_per_document"] = ""
    return rows


# ---- the published code ------------------------------------------------------------------------


class Published:
    """The published helper and data set, imported from a checkout."""

    def __init__(self, helpers: ModuleType, indexed: ModuleType, gpt2: ModuleType) -> None:
        self.helpers, self.indexed, self.gpt2 = helpers, indexed, gpt2

    def index(self, sizes: np.ndarray, doc_idx: np.ndarray, length: int, tokens: int) -> np.ndarray:
        """Return the sample index of one epoch, as int32 where that is enough."""
        names = ("build_sample_idx_int32", "build_sample_idx")  # KERPLE's code has the second one
        build = next(getattr(self.helpers, n) for n in names if hasattr(self.helpers, n))
        with without_output():
            return build(sizes, doc_idx, length, 1, tokens)

    def reader(self, prefix: Path, data: TokenDataset) -> Callable[[range], torch.Tensor]:
        """Return the function that reads a batch as a DataLoader of one process does."""
        shards = self.indexed.MMapIndexedDataset(str(prefix), skip_warmup=True)
        documents = np.arange(len(shards))
        found = self.gpt2.GPT2Dataset(
            "train", str(prefix), documents, shards, 0, 1, data.seq_length, 1234,
            build_index_mappings=False,
        )  # fmt: skip
        for name in ("doc_idx", "sample_idx", "shuffle_idx"):
            setattr(found, name, getattr(data.index, name))
        found.shuffle_idx_len = found.sample_idx_len = len(data) - 1
        collate = torch.utils.data.default_collate
        return lambda numbers: collate([found[number] for number in numbers])["text"]


def load_published(checkout: Path, folder: Path) -> Published:
    """Compile the checkout's helper and import its data set.

    Both files import `mpu` and `print_rank_0` from `megatron`, which are of no use here.
    """
    data = checkout / "megatron" / "data"
    target = folder / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [sysconfig.get_paths()["include"], Path(torch.__file__).parent / "include"]
    subprocess.run(
        ["g++", "-O3", "-shared", "-std=c++17", "-fPIC", *(f"-I{path}" for path in headers),
         str(data / "helpers.cpp"), "-o", str(target)],
        check=True,
    )  # fmt: skip
    megatron: Any = sys.modules["megatron"]
    megatron.mpu, megatron.print_rank_0 = None, lambda *_: None
    files = [("helpers", target)]
    files += [(name, data / f"{name}.py") for name in ("indexed_dataset", "gpt2_dataset")]
    return Published(*(module(name, path) for name, path in files))


def module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@contextmanager
def without_output() -> Iterator[None]:
    """Send what the process prints to nowhere; the helper prints from C++."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def draw(figure: Any, rows: list[dict]) -> None:
    """Plot the speed of each side, for the index and for reading."""
    for axes, task in zip(figure.subplots(2, 1), ("sample index", "reading"), strict=True):
        found = [row for row in rows if row["task"] == task]
        names = [row["code"] for row in found]
        bars(axes, names, {"": [row["samples_per_s"] / 1e6 for row in found]}, "{:,.2f}")
        axes.set_title(task)
    axes.set_xlabel("million samples a second")


if __name__ == "__main__":
    main()
