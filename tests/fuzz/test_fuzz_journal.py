"""Damaged journals of interrupted preparations: the run starts over, and its shards are right."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import numpy as np
from hypothesis import example, given

from megatron.data.errors import TokenizerError
from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from tests.fuzz.damage import FOLDER, damaged, in_time


class Interrupted(ByteLevelTokenizer):
    """Refuses a text, as a killed run leaves the text after it."""

    def encode(self, text: str) -> np.ndarray:
        if text == "zero":
            raise TokenizerError("interrupted")
        return super().encode(text)


@functools.cache
def interrupted() -> tuple[Path, bytes, dict[str, bytes]]:
    """A folder as an interrupted run leaves it, its journal, and the files of an unbroken run."""
    folder = FOLDER / "journal"
    folder.mkdir()
    for name in ("one", "two", "zero"):
        (folder / f"{name}.jsonl").write_text(f'"{name}"\n')
    sources = find_sources([folder / "*.jsonl"])
    Preparation(sources, [folder / "whole"], ByteLevelTokenizer(), checkpoint_seconds=0).run()
    whole = {suffix: (folder / f"whole{suffix}").read_bytes() for suffix in (".bin", ".idx")}
    try:
        Preparation(sources, [folder / "x"], Interrupted(), checkpoint_seconds=0).run()
    except TokenizerError as error:
        assert "goes on after the first 1 documents" in str(error)
    return folder, (folder / "x.journal").read_bytes(), whole


@given(damaged([interrupted()[1]], most=2))
@example(interrupted()[1])
@example(interrupted()[1].replace(b'"documents": 1', b'"documents": 0'))
@example(interrupted()[1].replace(b'"written": [[1, 4]]', b'"written": [[1, 3]]'))
@example(interrupted()[1].replace(b'"state": {', b'"state": {"written": [], "x": {'))
@example(b"[" * 3000)
@example(b"{}")
def test_a_journal(content: bytes) -> None:
    folder, _, whole = interrupted()
    other = FOLDER / "resumed"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    for path in folder.glob("x.*"):
        shutil.copy(path, other)
    (other / "x.journal").write_bytes(content)
    sources = find_sources([folder / "one.jsonl", folder / "two.jsonl", folder / "zero.jsonl"])
    with in_time():
        Preparation(sources, [other / "x"], ByteLevelTokenizer(), checkpoint_seconds=0).run()
    assert {suffix: (other / f"x{suffix}").read_bytes() for suffix in whole} == whole
    assert sorted(path.name for path in other.iterdir()) == ["x.bin", "x.idx", "x.json"]
