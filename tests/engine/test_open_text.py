"""Test a job's data: one or several prefixes, corpora per split, cached sample indices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.config import load_config
from megatron.data.errors import DataError, ShardError
from megatron.data.samples.blend import BlendedDataset
from megatron.data.samples.index_cache import cache_folder
from megatron.data.shards.manifest import build_manifest, to_bytes
from megatron.data.shards.merge import merge
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.engine.job_data import JobData
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.shards import write_documents

ALONE = SimpleNamespace(data_rank=0, data_size=1)


@pytest.fixture
def prefixes(tmp_path) -> list[str]:
    made = []
    for i, documents in enumerate((30, 60, 15)):
        folder = tmp_path / f"part{i}"
        folder.mkdir()
        made.append(write_shards(folder, documents))
    return made


def job_data(folder: Path, **changes) -> JobData:
    keys = {"train_micro_batch_size_per_gpu": 2, "data_path": None}
    config = write_config(folder / "config.yml", "", **(keys | changes))
    return JobData(load_config([config]), ALONE)


def batches(loader, count: int = 5) -> np.ndarray:
    return np.stack([next(loader) for _ in range(count)])


def test_a_list_or_a_glob_is_the_merged_data_set(prefixes, tmp_path):
    merge(prefixes, tmp_path / "whole")
    ways = (str(tmp_path / "whole"), prefixes, str(tmp_path / "part*/text_document"))
    found = [job_data(tmp_path, data_path=way) for way in ways]
    assert found[0].identity == found[1].identity == found[2].identity
    loaders = [data.training(index_samples=12, consumed=0) for data in found]
    first, *others = map(batches, loaders)
    for other in others:
        np.testing.assert_array_equal(first, other)


def corpora(prefixes) -> dict:
    return {
        "train_data_paths": prefixes[:2],
        "valid_data_paths": prefixes[2:],
        "test_data_paths": prefixes[2:],
    }


def test_corpora_for_each_split(prefixes, tmp_path):
    data = job_data(tmp_path, **corpora(prefixes), train_data_weights=[3, 1])
    loader = data.training(index_samples=12, consumed=0)
    assert isinstance(loader.dataset, BlendedDataset) and len(loader.dataset.datasets) == 2
    np.testing.assert_allclose(loader.dataset.weights, [0.75, 0.25])
    assert loader.dataset.choices.tolist()[:8].count(0) == 6
    assert data.text.splits == [(0, 90), (90, 105), (105, 120)] and len(data.text.shards) == 120
    held_out = data.held_out("valid", evaluations_before=0)
    assert [d.shards.prefix for d in held_out.dataset.datasets] == prefixes[2:]
    assert data.identity["corpora"]["train"] == [[30, 3.0], [60, 1.0]]
    by_documents = job_data(
        tmp_path, **corpora(prefixes), weight_by_num_documents=True, weighted_sampler_alpha=0.3
    )
    weights = [corpus.weight for corpus in by_documents.text.corpora["train"]]
    shares = np.array([30, 60]) / 90
    wanted = shares**0.3 / (shares**0.3).sum() * (1 - shares)
    np.testing.assert_allclose(weights, wanted / wanted.sum())


@pytest.mark.parametrize("kind", ["one", "blend", "task"])
def test_a_resumed_run_of_another_batch_size_has_samples_to_its_last_step(tmp_path, kind):
    """The batch size is 2, then 8, then 2; the index is built for 16 samples, and 40 are read."""
    prefix = str(tmp_path / "text")
    write_documents(prefix, np.random.default_rng(3).integers(0, 256, (1, 16 * 16 + 1)))
    text = {
        "one": {"data_path": prefix, "split": "1,0,0"},
        "blend": {f"{split}_data_paths": [prefix] * 2 for split in ("train", "valid", "test")},
        "task": {"data_path": "builtin:copy", "task_options": {"max_length": 7}},
    }[kind] | ({"tokenizer_type": None} if kind == "task" else {})
    consumed, read = 0, []
    for batch, before, steps in ((2, 0, 2), (8, 2, 4), (2, 6, 2)):
        data = job_data(tmp_path, train_micro_batch_size_per_gpu=batch, train_iters=8, **text)
        least = (8 - before) * batch
        loader = data.training(index_samples=16, consumed=consumed, least=least)
        read += batches(loader, steps).reshape(-1, 17).tolist()
        consumed = loader.consumed_samples
    assert consumed == 40 and len(read) == 40
    whole = job_data(tmp_path, train_iters=8, **text)
    loader = whole.training(index_samples=16, consumed=0, least=40)
    assert read == batches(loader, 20).reshape(-1, 17).tolist()


def test_each_shard_is_opened_once(prefixes, tmp_path, monkeypatch):
    """This holds if the config names it in a list, by a glob, or in two splits."""
    opened = []

    def counted(prefix: str) -> ShardReader:
        opened.append(prefix)
        return ShardReader(prefix)

    monkeypatch.setattr("megatron.data.shards.joined.ShardReader", counted)
    shared = {
        "train_data_paths": [str(tmp_path / "part[01]/text_document"), prefixes[2]],
        "valid_data_paths": prefixes[2:],
        "test_data_paths": prefixes[2:],
    }
    for changes in ({"data_path": prefixes}, corpora(prefixes), shared):
        data = job_data(tmp_path, **changes)
        next(data.training(index_samples=12, consumed=0))
        next(data.held_out("valid", evaluations_before=0))
        assert sorted(opened) == sorted(prefixes)
        opened.clear()
    assert data.text.splits == [(0, 105), (105, 120), (120, 135)]


def test_another_tokenizer_is_refused(prefixes, tmp_path):
    Path(f"{prefixes[1]}.json").write_text('{"tokenizer_fingerprint": "0"}')
    with pytest.raises(ShardError, match="was made with None .* not with this run's"):
        job_data(tmp_path, **corpora(prefixes))
    with pytest.raises(ShardError, match="not with this run's"):
        job_data(tmp_path, data_path=prefixes)


@pytest.mark.parametrize("key", ["reset_attention_mask", "eod_mask_loss"])
def test_documents_without_ends_are_refused_where_ends_are_needed(prefixes, tmp_path, key):
    job_data(tmp_path, data_path=prefixes[0], **{key: True})  # a shard without a manifest
    manifest = build_manifest(ByteLevelTokenizer(), append_eod=False, counts={}, source={})
    Path(prefixes[0] + ".json").write_bytes(to_bytes(manifest))
    job_data(tmp_path, data_path=prefixes[0])
    with pytest.raises(DataError, match=f"no end-of-document tokens, but {key} is true; prepare"):
        job_data(tmp_path, data_path=prefixes[0], **{key: True})
    corpora = {f"{name}_data_paths": [prefixes[0]] for name in ("train", "valid", "test")}
    with pytest.raises(DataError, match="no end-of-document tokens"):
        job_data(tmp_path, **corpora, **{key: True})


def test_indices_are_kept_beside_the_data_or_in_a_folder_of_the_machine(
    prefixes, tmp_path, monkeypatch
):
    data = job_data(tmp_path, data_path=prefixes[0])
    expected = batches(data.training(index_samples=12, consumed=0))
    folder = tmp_path / "part0/index_cache"
    assert [path.name.split("_")[0] for path in folder.glob("*/")] == ["train"]
    # A file in place of the folder stands for a read-only disk, which root could write.
    for path in [*folder.rglob("*"), *folder.glob(".*")]:
        path.unlink(missing_ok=True) if path.is_file() else None
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()
    folder.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "machine"))
    (tmp_path / "machine").mkdir()
    assert cache_folder(tmp_path / "part0").parent == tmp_path / "machine"
    data = job_data(tmp_path, data_path=prefixes[0])
    np.testing.assert_array_equal(batches(data.training(index_samples=12, consumed=0)), expected)
    assert len(list((tmp_path / "machine").glob("*/train_*"))) == 1
    monkeypatch.setattr("os.getuid", lambda: 4321)
    (tmp_path / "machine/kerple-index-4321").symlink_to(tmp_path)
    with pytest.raises(DataError, match="kerple-index-4321: belongs to another user; set TMPDIR"):
        cache_folder(tmp_path / "part0")


def test_two_corpora_of_equal_counts_that_change_places_are_noticed(tmp_path):
    """Only the fingerprint of the text tells them apart."""
    made = [str(tmp_path / name) for name in "ab"]
    for number, prefix in enumerate(made):
        write_documents(prefix, [[number] * 40, [5] * 30])
    one, other = (
        job_data(tmp_path, train_data_paths=paths, valid_data_paths=made, test_data_paths=made)
        for paths in (made, made[::-1])
    )
    assert one.identity.keys() == other.identity.keys()
    differing = {key for key in one.identity if one.identity[key] != other.identity[key]}
    assert differing == {"content"}
