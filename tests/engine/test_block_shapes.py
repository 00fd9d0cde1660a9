"""Test that each block shape of GPT-NeoX's, KERPLE's and a fork's model files trains, scaled down.

A shape is the keys of the model section that differ from their defaults in a file that
`tools/check_neox_configs.py` accepts, with sizes scaled down to SMALL.
"""

from __future__ import annotations

import json
import math

import pytest

from megatron.engine.job import join
from tests.helpers.jobs import rows, run_job, write_config
from tests.helpers.paths import FIXTURES

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
SHAPES = json.loads((FIXTURES / "config" / "block_shapes.json").read_text())


@pytest.fixture(scope="module")
def groups():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "0")  # restored afterwards
            patch.delenv(name)
        yield join.join_job()
        join.leave_job()


def test_every_accepted_file_has_a_shape():
    files = [name for shape in SHAPES for name in shape["files"]]
    assert len(files) == len(set(files))
    published = [name for name in files if name.startswith(("gpt-neox/", "KERPLE/"))]
    assert len(published) == 49
    assert len(SHAPES) == len({json.dumps(shape["keys"], sort_keys=True) for shape in SHAPES})


@pytest.mark.parametrize("shape", SHAPES, ids=[shape["files"][0] for shape in SHAPES])
def test_the_shape_trains(shape, prefix, groups, tmp_path):
    config = write_config(
        tmp_path / "config.yml",
        prefix,
        **SMALL | shape["keys"],
        save=str(tmp_path / "run"),
        train_micro_batch_size_per_gpu=4,
        train_iters=5,
        eval_iters=0,
    )
    run_job(groups, config)
    losses = rows(tmp_path / "run")
    assert [*losses] == [1, 2, 3, 4, 5] and all(map(math.isfinite, losses.values()))
    assert losses[5] < losses[1] - 0.1, losses
