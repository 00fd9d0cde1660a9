"""Check the parity cases `data`: compare shards, sample orders, batches and tokens exactly.

A `data` folder contains token shards and other outputs of the published code:

    X_text_document.bin    a token shard of the published code, together with X_text_document.idx
    X.jsonl                the text of this shard. It is tokenised, and the resulting .bin and .idx
                           files are compared with the published ones byte by byte.
    samples_*/             the three index arrays, the first samples, and a hash of all samples
    iterators/             batches that a new or resumed run reads, and a hash of all batches
    tokenizer_cases.json   texts with their token ids
    tokenizer/             the files of GPT-2's tokenizer (optional)

The tool can also be started with a folder samples_* or iterators. It then finds the shards in the
parent folder. Without the folder `tokenizer`, no text is tokenised. Only the number of documents
and the range of the token ids are then checked, and the result lists what was not checked.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.loader import TrainLoader, published_start, sample_counts
from megatron.data.samples.split import SPLITS, split_documents
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.model.padded_vocab import padded_vocab_size
from tests.parity.case_files import read_arrays, read_manifest
from tests.parity.result import Result

TOKENIZER = "tokenizer"
"""The name of the folder with GPT-2's tokenizer files in a `data` case."""


def check_corpora(folder: Path, name: str) -> Iterator[Result]:
    """Tokenise each .jsonl file in `folder`, and compare the result with the published shards."""
    tokenizer = _tokenizer(folder)
    for corpus in sorted(folder.glob("*.jsonl")):
        result, shards = Result(f"{name} {corpus.name}"), f"{corpus.stem}_text_document"
        if tokenizer is None:
            result.unchecked.append(f"the tokens: {folder / TOKENIZER} does not exist")
            with corpus.open(encoding="utf-8") as lines:
                documents = sum(bool(json.loads(line)["text"]) for line in lines)
            published = len(ShardReader(folder / shards))
            result.add("number of documents", abs(documents - published), 0)
            yield result
            continue
        with tempfile.TemporaryDirectory() as temporary:
            prefix = Path(temporary) / shards
            Preparation(find_sources([corpus]), [prefix], tokenizer).run()
            for end in (".bin", ".idx"):
                published = (folder / (shards + end)).read_bytes()
                ours = prefix.with_name(shards + end).read_bytes()
                result.add(f"bytes of {end}", _differing(ours, published), 0)
        yield result


def check_tokens(folder: Path, name: str) -> Result:
    """Tokenise the texts in tokenizer_cases.json, and compare the ids with those in the file."""
    recorded = json.loads((folder / "tokenizer_cases.json").read_text())
    result = Result(f"{name} tokenizer")
    cases, size = recorded["cases"], recorded["vocab_size"]
    result.expect("padded", padded_vocab_size(size, 128), recorded["padded"])
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        result.unchecked.append(f"the ids: {folder / TOKENIZER} does not exist")
        ids = [recorded["eod"], *(i for case in cases for i in case["ids"])]
        result.add("ids outside the vocabulary", sum(not 0 <= i < size for i in ids), 0)
        return result
    result.expect("vocab_size", tokenizer.vocab_size, size)
    result.expect("eod", tokenizer.eod, recorded["eod"])
    wrong = [case["text"] for case in cases if list(tokenizer.encode(case["text"])) != case["ids"]]
    result.faults += [f"{text!r} gives other ids" for text in wrong]
    result.add(f"of {len(cases)} texts, differing", len(wrong), 0)
    return result


def check_samples(folder: Path, name: str) -> Result:
    """Check a folder samples_*: the index arrays, the first samples, and the hash of all samples.

    Each split (train, valid, test) is checked.
    """
    manifest, published = read_manifest(folder), read_arrays(folder / "index_and_samples.npz")
    result, shards = Result(name), _shards(folder)
    splits = split_documents(manifest["split"], len(shards))
    result.expect("documents", len(shards), manifest["documents"])
    result.expect("tokens", int(shards.sizes.sum(dtype=np.int64)), manifest["tokens"])
    bounds = [0, *(end for _, end in splits)]
    result.expect("bounds of the splits", bounds, manifest["splits_index"])
    for split, (start, end) in zip(SPLITS, splits, strict=True):
        about = manifest["datasets"].get(split)
        if about is None:
            result.expect(f"{split} documents", end - start, 0)
            continue
        length = manifest["seq_length" if split == "train" else "seq_length_val"]
        wanted = manifest["num_samples"][split]
        dataset = TokenDataset(shards, (start, end), wanted, length, manifest["seed"], split)
        result.expect(f"{split} length", dataset.published_length, about["len"])
        result.expect(f"{split} built", dataset.index.num_built, about["num_built_samples"])
        for array in ("doc_idx", "sample_idx", "shuffle_idx"):
            ours, theirs = getattr(dataset.index, array), published[f"{split}/{array}"]
            result.expect(f"{split} {array} dtype", str(ours.dtype), about["dtypes"][array])
            _exact(result, "order", ours, theirs)
        first = published[f"{split}/samples"]
        _exact(result, "samples", dataset.batch(range(len(first))), first)
        digest = _hash(dataset.batch(range(about["len"])))
        result.expect(f"{split} hash of all samples", digest, about["sha256_all_samples_int64"])
    return result


def check_iterators(folder: Path, name: str) -> Iterator[Result]:
    """Check the batches in a folder `iterators`, and yield one result for each run and split."""
    runs, batches = read_manifest(folder), read_arrays(folder / "batches.npz")
    shards = _shards(folder)
    for key, run in runs.items():
        for split in (split for split in SPLITS if f"{key}/{split}" in batches):
            result = Result(f"{name} {key} {split}")
            _check_iterator(shards, run, split, batches[f"{key}/{split}"], result)
            yield result


def _check_iterator(
    shards: ShardReader, run: dict, split: str, published: np.ndarray, result: Result
) -> None:
    number = SPLITS.index(split)
    every, iters, global_batch = run["eval_interval"], run["eval_iters"], run["train_batch_size"]
    samples = sample_counts(run["train_iters"], every, iters, global_batch)[number]
    documents = split_documents(run["split"], len(shards))[number]
    length = run["seq" if split == "train" else "seq_val"]
    dataset = TokenDataset(shards, documents, samples, length, run["seed"], split)
    micro_steps = run.get("gas", global_batch // run["bs"])
    loader = TrainLoader(dataset, run["bs"] * micro_steps, run["bs"])
    start = published_start(loader, split, run["iteration"], eval_interval=every, eval_iters=iters)
    loader.consumed_samples = start
    # The published data set may be one sample shorter than requested. Ours has all samples.
    left = (dataset.published_length - start) // run["bs"]
    result.expect("batches left", left, run[split]["batches_left"])
    ours = np.stack([next(loader) for _ in range(left)])
    _exact(result, "batches", ours[: len(published)], published)
    result.expect("hash of all batches", _hash(ours), run[split]["sha256_all"])


def _exact(result: Result, what: str, ours: np.ndarray, published: np.ndarray) -> None:
    """Count the elements that differ between two integer arrays.

    The count is added to `result` as an error with tolerance 0, so the case fails if any element
    differs. If the arrays have different shapes, a fault is added to `result` instead.
    """
    if ours.shape != published.shape:
        result.faults.append(f"{what}: {ours.shape}, published {published.shape}")
        return
    wrong = int(np.count_nonzero(ours.astype(np.int64) != published.astype(np.int64)))
    result.add(f"{what}, differing", wrong, 0)


def _differing(ours: bytes, published: bytes) -> int:
    """Return the number of bytes that differ, including all extra bytes of the longer argument."""
    size = min(len(ours), len(published))
    a, b = np.frombuffer(ours, np.uint8, size), np.frombuffer(published, np.uint8, size)
    return int(np.count_nonzero(a != b)) + abs(len(ours) - len(published))


def _hash(samples: np.ndarray) -> str:
    return hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest()


def _shards(folder: Path) -> ShardReader:
    """Open the first shard in `folder`, or in its parent folder if `folder` has none."""
    for place in (folder, folder.parent):
        for index in sorted(place.glob("*.idx")):
            return ShardReader(index.with_suffix(""))
    raise FileNotFoundError(f"{folder}: no *.idx there, nor in {folder.parent}")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Build GPT-2's tokenizer from the files in `folder`/tokenizer.

    Return None if there is no such folder.
    """
    files = folder / TOKENIZER
    if not files.is_dir():
        return None
    vocab, merges = sorted(files.glob("*vocab*")), sorted(files.glob("*merges*"))
    if not vocab or not merges:
        raise FileNotFoundError(f"{files}: needs a *vocab* and a *merges* file")
    return build_tokenizer("GPT2BPETokenizer", str(vocab[0]), str(merges[0]))
