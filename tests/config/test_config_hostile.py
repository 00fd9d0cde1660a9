"""Configurations that would hang, fill memory or the disk's files with secrets: one clear line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config import ConfigError, load_config

Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("hidden_size: 10000000", "hidden_size", "2.4e+15 parameters follow from it"),
        ("hidden_size: 1.0e12", "hidden_size", "write a smaller number"),
        ("hidden_size: 1e300", "hidden_size", "1e+300 is above 1,000,000,000,000"),
        ("num_layers: 99999999", "num_layers", "above 100,000"),
        ("make_vocab_size_divisible_by: 1000000000000", "make_vocab_size_divisible_by", "6.4e+13"),
        ("{pos_emb: learned, seq_length: 900000000000}", "max_position_embeddings", "parameters"),
        ("{pos_emb: rpe, rpe_num_buckets: 99999999999999}", "rpe_num_buckets", "smaller number"),
        ("seq_length: 1000000000000", "seq_length", "fits into no machine's memory"),
        ("seq_length_val: 1000000000000", "seq_length_val", "fits into no machine's memory"),
        ("train_batch_size: 1000000000000", "seq_length", "fits into no machine's memory"),
        ("train_iters: 1000000000000", "train_iters", "4.0e+12 samples"),
        (
            "fp16: {enabled: true, initial_scale_power: 999999999}",
            "fp16.initial_scale_power",
            "127",
        ),
        ("save_interval: 10000000000000000", "save_interval", "1e+16 is above"),
        ('save: "runs/a\\0b"', "save", "a character that no path"),
        ('load: "a\\ud800"', "load", "a character that no path"),
        ('data_path: ["a", "b\\0"]', "data_path", "a character that no path"),
        ("save: !!python/object/apply:os.system [true]", "save", "expected text"),
        ("save: !!python/name:os.system", "save", "the YAML tag"),
        ("save: !!binary aGk=", "save", "the YAML tag"),
        ("<<: *a", "", "not valid YAML"),
        ("a: &a [*a]", "", ""),
        ("[" * 9999, "", "nested too deeply"),
    ],
)
def test_absurd_values_are_refused_before_anything_is_built(
    problems: Problems, text: str, key: str, says: str
) -> None:
    lines = [line for line in problems(text) if key in line]
    assert any(says in line for line in lines)


@pytest.mark.parametrize("key", ["wandb_host", "data_path", "save", "wandb_project"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_password_in_an_address_is_refused_and_not_repeated(
    problems: Problems, key: str, quote: str
) -> None:
    value = f"{quote}https://me:hunter2@host.example/x{quote}"
    (line,) = problems(f"{key}: {value}")
    assert line.startswith(f"over.yml:1: {key}: contains a user name or a password")
    assert "WANDB_API_KEY" in line and "hunter2" not in line
    (line,) = problems("", f"{key}={value}")
    assert "contains a user name" in line and "hunter2" not in line and "https://***@host" in line


def test_an_address_without_a_password_is_taken(load: Callable) -> None:
    host = "https://wandb.example:8080/a@b"
    assert load(f"wandb_host: {host}").logging.wandb_host == host


@pytest.mark.parametrize(
    ("text", "times"), [(b"save: " + b"x" * 60, 1_000_000), (b"a: 1\n", 15_000_000)]
)
def test_a_huge_file_is_refused_at_once(tmp_path: Path, text: bytes, times: int) -> None:
    (tmp_path / "huge.yml").write_bytes(text * times)
    start = time.process_time()  # the machine may be busy
    with pytest.raises(ConfigError, match="huge.yml: more than 2,000,000 bytes"):
        load_config([tmp_path / "huge.yml"])
    assert time.process_time() - start < 5


def test_an_endless_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: more than 2,000,000 bytes"):
        load_config(["/dev/zero"])
