"""Test training, resuming and converting with numbers of ranks that divide no weight evenly."""

import pytest

from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from tests.helpers.jobs import cell, digest, rewind, rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks

SAMPLES = 15  # a step, for 1, 3 and 5 ranks
CELLS = [(3, 3, "fp32"), (3, 2, "bf16"), (5, 3, "fp32")]
TRUTHS = [(1, 1, "fp32"), (1, 1, "bf16")]
STEPS = 3


def name(world_size, stage, precision):
    return f"w{world_size}-z{stage}-{precision}"


def train(groups, folder, prefix):
    """Train every cell of this number of ranks with and without an interruption after step 2."""

    def run(target, stage, precision, **changes):
        config = folder / f"{target.name}.yml"
        if groups.is_main:
            changes |= cell(stage, precision) | {
                "save": str(target),
                "train_iters": STEPS,
                "save_interval": 2,
                "eval_iters": 0,
                "train_micro_batch_size_per_gpu": SAMPLES // groups.world_size,
            }
            write_config(config, prefix, **{"load": str(target)} | changes)
        groups.barrier()
        run_job(groups, config)

    cells = [each for each in [*CELLS, *TRUTHS] if each[0] == groups.world_size]
    for world_size, stage, precision in cells:
        whole = folder / name(world_size, stage, precision)
        broken = folder / f"{whole.name}-broken"
        run(whole, stage, precision)
        if groups.is_main:
            rewind(whole, broken, step=2)
        groups.barrier()
        run(broken, stage, precision)
    if groups.world_size == 5:
        if groups.is_main:
            rewind(folder / name(3, 3, "fp32"), folder / "converted", step=2)
        groups.barrier()
        run(folder / "converted", 3, "fp32")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    prefix = write_shards(folder)
    for world_size in (1, 3, 5):
        run_ranks(world_size, train, folder, prefix)
    return folder


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: name(*cell))
def test_losses_are_those_of_one_process(runs, cell):
    truth = rows(runs / name(1, 1, cell[2]))
    found = rows(runs / name(*cell))
    assert list(truth) == list(range(1, STEPS + 1))
    assert found == pytest.approx(truth, abs=2e-6 if cell[2] == "fp32" else 2e-2)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: name(*cell))
def test_resuming_is_bitwise_identical(runs, cell):
    whole, broken = runs / name(*cell), runs / f"{name(*cell)}-broken"
    assert newest(whole).step == newest(broken).step == STEPS
    assert digest(whole) == digest(broken)
    assert rows(whole) == rows(broken)


def test_weights_and_theta_can_be_read_without_an_engine(runs):
    truth = Saved(runs / name(1, 1, "fp32"), f"global_step{STEPS}").weights()
    for folder in (name(3, 3, "fp32"), name(5, 3, "fp32"), "converted"):
        weights = Saved(runs / folder, f"global_step{STEPS}").weights()
        assert weights.keys() == truth.keys()
        for key, value in truth.items():
            assert (weights[key] - value).abs().max() < 1e-5, key


def test_three_ranks_convert_to_five(runs):
    truth = rows(runs / name(1, 1, "fp32"))
    assert rows(runs / "converted") == pytest.approx(truth, abs=2e-6)
