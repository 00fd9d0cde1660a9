"""Test that a set of layouts, which covers all pairs of settings, trains as one process does.

The whole matrix is a script, tests/distributed/matrix.py; its log is kept beside it.
"""

import itertools

import pytest

from tests.distributed.matrix import (
    AXES,
    TOLERANCE,
    Cell,
    all_cells,
    alternating,
    covering,
    distance,
    layout,
    missing,
    pairs,
    train_all,
)
from tests.helpers.jobs import write_shards

SMALL = [cell for cell in all_cells(ranks=4, largest=2) if cell.ranks > 1]
CELLS = covering(SMALL)
# Three settings together that DeepSpeed alone would clip by a part of the norm.
CELLS += [Cell(tp=2, pp=1, dp=1, zero=0, dtype="bf16", pos="kerple_log", tied=False)]
# A LLaMA-shaped model, with every option of a block.
CELLS += [
    Cell(tp=2, pp=2, dp=1, zero=1, dtype="fp32", pos="llama", tied=False, sp=True),
    Cell(tp=2, pp=1, dp=1, zero=3, dtype="fp32", pos="llama", tied=False, cp=2),
]
# More context-parallel ranks than key heads.
CELLS += [Cell(tp=2, pp=1, dp=1, zero=3, dtype="fp32", pos="grouped", tied=True, sp=True, cp=2)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    train_all(folder, write_shards(folder), [*CELLS, *(cell.truth for cell in CELLS)])
    return folder


def test_the_cells_cover_every_layout_and_every_pair_of_settings():
    assert {layout(cell) for cell in CELLS} == {layout(cell) for cell in SMALL}
    covered = set().union(*map(pairs, CELLS))
    for (a, these), (b, those) in itertools.combinations(AXES.items(), 2):
        for x, y in itertools.product(these, those):
            pair = {a: x, b: y}
            if any(pair.get(axis, 1) > 2 for axis in ("tp", "pp", "dp")):
                continue  # up to eight processes: in the script
            refused = pair.get("pp") == 2 and (pair.get("zero", 1) != 1 or pair.get("cp") == 2)
            refused |= pair.get("sp", False) and pair.get("tp") == 1
            assert (((a, x), (b, y)) in covered) != refused, pair


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_follows_one_process(trained, cell):
    assert distance(trained, cell) <= TOLERANCE[cell.dtype]


def test_a_log_is_continued_where_it_stops(tmp_path):
    log = tmp_path / "log"
    log.write_text(f"{CELLS[0].name:<58} 1.00e-07 (at most 1e-05) ok\n{CELLS[2].name} x FAILED\n")
    assert missing(CELLS, log) == [CELLS[1], *CELLS[3:]]


def test_the_shorter_matrix_has_every_layout_with_each_dtype_tied_and_untied():
    def whole_layout(cell):
        return *layout(cell), cell.sp, cell.zero, cell.tied

    whole = all_cells(ranks=8)
    shorter = alternating(whole)
    assert len(shorter) < len(whole) / 2
    assert {whole_layout(cell) for cell in shorter} == {whole_layout(cell) for cell in whole}
