"""Test what the mutation tool needs no cosmic-ray for: its map, its log, the order of tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.paths import ROOT
from tests.mutation.covering_tests import ALSO, covering, mutated_files
from tests.mutation.log import EQUIVALENT, GONE, KILLED, SLOWLY, SURVIVED, Row, read, summary
from tests.mutation.server import Plugin

LOGS = sorted((ROOT / "tests" / "mutation").glob("*.log"))


@pytest.mark.parametrize("source", mutated_files(ROOT))
def test_every_mutated_file_has_tests(source):
    found = covering(ROOT, source)
    assert found and all((ROOT / name).is_file() for name in found)


def test_the_map_names_files_that_exist_and_mirrors_folders():
    assert set(ALSO) <= set(mutated_files(ROOT))
    meter = covering(ROOT, "megatron/engine/training/meter.py")
    assert meter == ["tests/engine/training/test_meter.py"]
    claims = covering(ROOT, "tools/experiments/claims.py")
    assert "tests/tools/experiments/test_experiment_statistics.py" in claims


def row(verdict: str) -> Row:
    return Row(verdict, "1.0", "a.py:3", "NumberReplacer", "x = 1", "x = 2", "a note")


def test_a_log_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "a.log"
    assert read(path) == ([], [])
    rows = [row(KILLED), row(EQUIVALENT)]
    path.write_text("\n".join(["# a command", *(each.text() for each in rows), ""]))
    assert read(path) == (["# a command"], rows)


def test_equivalent_mutants_do_not_count():
    verdicts = [KILLED] * 5 + [SLOWLY, GONE, SURVIVED, EQUIVALENT, EQUIVALENT]
    assert summary([row(each) for each in verdicts]) == (
        "10 mutants: 5 killed, 2 equivalent, 1 slowly, 1 gone, 1 survived; 7 of 8 not equivalent "
        "are dead (87.5%)"
    )


@pytest.mark.parametrize("log", LOGS, ids=[path.stem for path in LOGS])
def test_nine_of_ten_mutants_of_a_committed_log_died(log):
    comments, rows = read(log)
    assert comments and all(each.note for each in rows)
    counted = [each for each in rows if each.verdict != EQUIVALENT]
    survived = [each for each in counted if each.verdict == SURVIVED]
    assert len(survived) <= len(counted) / 10 and len(rows) - len(counted) <= len(rows) / 10


def test_the_cheapest_file_and_test_run_first_and_slow_tests_apart():
    def item(file, name):
        return SimpleNamespace(nodeid=f"{file}::{name}", path=Path(file))

    items = [item("b", "dear"), item("b", "new"), item("a", "fair"), item("a", "slow")]
    costs = {"b::dear": 3.0, "a::fair": 2.0, "a::slow": 9.0}
    for slow, expected in ((False, ["a::fair", "b::new", "b::dear"]), (True, ["a::slow"])):
        chosen = list(items)
        Plugin(costs, slow).pytest_collection_modifyitems(chosen)
        assert [each.nodeid for each in chosen] == expected
