"""Test the parity tool on data, schedules and derived configs; a changed case must fail."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.parity import changed_npz, check
from tests.helpers.paths import ROOT


@pytest.fixture(scope="session")
def data_case(fixtures, gpt2_files, tmp_path_factory) -> Path:
    """Return the committed data in the layout of a `data` case."""
    source, folder = fixtures / "data", tmp_path_factory.mktemp("cases") / "data"
    for part, files in {
        "samples_a": ("samples_a", "index_and_samples"),
        "samples_b": ("samples_b", "index_and_samples"),
        "iterators": ("iterators", "batches"),
    }.items():
        (folder / part).mkdir(parents=True)
        shutil.copy(source / f"{files[0]}.json", folder / part / "manifest.json")
        shutil.copy(source / f"{files[0]}.npz", folder / part / f"{files[1]}.npz")
    (folder / "tokenizer").mkdir()
    shutil.copy(gpt2_files[0], folder / "tokenizer" / "gpt2-vocab.json")
    shutil.copy(gpt2_files[1], folder / "tokenizer" / "gpt2-merges.txt")
    for name in ("corpus_text_document.bin", "corpus_text_document.idx", "tokenizer_cases.json"):
        shutil.copy(source / name, folder)
    text = gzip.decompress((source / "corpus.jsonl.gz").read_bytes())
    (folder / "corpus.jsonl").write_bytes(text)
    return folder


def test_data_cases_pass_and_so_do_their_parts(data_case, capsys):
    code, lines = check(capsys, data_case)
    assert code == 0 and lines[-1] == "16 cases, 0 failed", lines
    code, lines = check(capsys, data_case / "samples_a", data_case / "iterators")
    assert code == 0 and lines[-1] == "13 cases, 0 failed", lines


def test_derived_configurations_pass(fixtures, capsys):
    code, lines = check(capsys, fixtures / "config")
    assert code == 0 and lines[-1] == "6 cases, 0 failed", lines


def test_one_changed_sample_is_seen(data_case, tmp_path, capsys):
    shutil.copytree(data_case, tmp_path / "data")

    def next_token(stored):
        stored[17].flat[3] += 1
        return stored

    samples = tmp_path / "data" / "samples_b" / "index_and_samples.npz"
    changed_npz(samples, "valid/samples", next_token)
    code, lines = check(capsys, tmp_path / "data")
    [line] = [line for line in lines if line.startswith("FAIL")]
    assert code == 1 and "samples, differing 1 (0) TOO FAR" in line and "samples_b" in line
    batches = tmp_path / "data" / "iterators" / "batches.npz"
    changed_npz(batches, "train_resume17/train", lambda stored: stored[::-1])
    code, lines = check(capsys, tmp_path / "data" / "iterators")
    [line] = [line for line in lines if line.startswith("FAIL")]
    assert code == 1 and "train_resume17 train" in line


def test_one_changed_byte_token_rate_and_setting_are_seen(data_case, cases, tmp_path, capsys):
    folder = shutil.copytree(data_case, tmp_path / "data")
    shards = folder / "corpus_text_document.bin"
    content = bytearray(shards.read_bytes())
    content[1000] ^= 1
    shards.write_bytes(content)
    tokens = json.loads((folder / "tokenizer_cases.json").read_text())
    tokens["cases"][3]["ids"][0] += 1
    (folder / "tokenizer_cases.json").write_text(json.dumps(tokens))
    shutil.rmtree(folder / "samples_a")
    shutil.rmtree(folder / "samples_b")
    shutil.rmtree(folder / "iterators")
    code, lines = check(capsys, folder)
    assert code == 1 and lines[-1] == "2 cases, 2 failed"
    assert "bytes of .bin 1 (0) TOO FAR" in lines[0] and "bytes of .idx 0 (0)" in lines[0]

    rates = json.loads((cases / "config" / "lr_schedule.json").read_text())
    rates["train.yml"]["lr_at_num_iters"]["750"] *= 1 + 1e-11
    derived = json.loads((ROOT / "tests/fixtures/config/derived_args.json").read_text())
    derived["train_kerple_log_arxiv_1235_gpus8"]["derived"]["train_batch_size"] = 32
    config = tmp_path / "config"
    config.mkdir()
    (config / "lr_schedule.json").write_text(json.dumps(rates))
    (config / "derived_args.json").write_text(json.dumps(derived))
    code, lines = check(capsys, config)
    assert code == 1 and lines[-1] == "7 cases, 2 failed"
    assert any("train_batch_size: 256, published 32" in line for line in lines)


def test_data_without_a_tokenizer_is_checked_as_far_as_possible(data_case, tmp_path, capsys):
    folder = shutil.copytree(data_case, tmp_path / "data")
    shutil.rmtree(folder / "tokenizer")
    code, lines = check(capsys, folder)
    assert code == 0 and lines[-1] == "16 cases, 0 failed, 2 checked in part", lines
    corpus, tokens, *complete = lines[:-1]
    missing = f"{folder / 'tokenizer'} does not exist"
    assert "number of documents 0 (0)" in corpus and f"not checked: the tokens: {missing}" in corpus
    assert f"not checked: the ids: {missing}" in tokens
    assert not any("not checked" in line for line in complete)

    with (folder / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"text": "one more"}\n')
    cases = json.loads((folder / "tokenizer_cases.json").read_text())
    cases["cases"][3]["ids"][0] = cases["vocab_size"]
    (folder / "tokenizer_cases.json").write_text(json.dumps(cases))
    code, lines = check(capsys, folder)
    assert code == 1 and lines[-1] == "16 cases, 2 failed, 2 checked in part"
    assert "number of documents 1 (0) TOO FAR" in lines[0]
    assert "ids outside the vocabulary 1 (0) TOO FAR" in lines[1]


def test_an_empty_tokenizer_folder_is_a_failure(data_case, tmp_path, capsys):
    folder = shutil.copytree(data_case, tmp_path / "data")
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    code, lines = check(capsys, folder)
    assert code == 1 and "needs a *vocab* and a *merges* file" in lines[0]
