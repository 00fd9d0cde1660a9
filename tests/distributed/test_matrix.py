"""Every layout trains the model of one process: a set of cells that covers all pairs of settings.

The whole matrix is a script, tests/distributed/matrix.py; its log is kept beside it.
"""

import itertools

import pytest
from matrix import AXES, TOLERANCE, all_cells, covering, distance, pairs, train_all

from jobs import write_shards  # isort: skip

CELLS = covering(all_cells(ranks=4, largest=2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    train_all(folder, write_shards(folder), [*CELLS, *(cell.truth for cell in CELLS)])
    return folder


def test_the_cells_cover_every_pair_of_settings():
    covered = set().union(*map(pairs, CELLS))
    for (a, these), (b, those) in itertools.combinations(AXES.items(), 2):
        for x, y in itertools.product(these, those):
            refused = {a: x, b: y}.get("pp") == 2 and {a: x, b: y}.get("zero", 1) != 1
            if max((v for v in (x, y) if type(v) is int and (a, v) != ("zero", v)), default=0) > 2:
                continue  # up to eight processes: in the script
            assert (((a, x), (b, y)) in covered) != refused, ((a, x), (b, y))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_follows_one_process(trained, cell):
    assert distance(trained, cell) <= TOLERANCE[cell.dtype]
