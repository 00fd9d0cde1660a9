"""Theta is clamped after a step, in the model's copy and in the master, without ZeRO."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from megatron.engine.training import trained_theta as module
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.numerics import PublishedNumerics
from megatron.parallel.groups import TensorGroup, build_groups
from megatron.positional import load

CPU = build_groups(torch.device("cpu"))
BEYOND = [[-1.0, 5.0], [3.0, 0.5], [1.0, -7.0]]  # kerple_power: 0.01 <= p <= 2, a >= 0.01
POWER = load("kerple_power")
WITHIN = [[0.01, 5.0], [2.0, 0.5], [1.0, 0.01]]


def with_masters(*pairs):
    """Return DeepSpeed's optimizer of 16-bit training without ZeRO, with these masters."""
    optimizer = object.__new__(FP16_UnfusedOptimizer)
    optimizer.fp16_groups = [[nn.Parameter(torch.ones(1))], [copy for copy, _ in pairs]]
    optimizer.fp32_groups = [[torch.ones(1)], [master for _, master in pairs]]
    return SimpleNamespace(optimizer=optimizer)


def trained(parameters, engine=None, pos=None, groups=CPU):
    return TrainedTheta(engine or SimpleNamespace(optimizer=None), parameters, pos or POWER, groups)


def near(values):
    return pytest.approx(torch.tensor(values).numpy())


def test_in_fp32_theta_is_its_own_master():
    theta = nn.Parameter(torch.tensor(BEYOND))
    ours = trained([theta])
    copy = ours.master()
    assert copy.tolist() == BEYOND and copy is not theta and not copy.requires_grad
    copy.zero_()
    assert theta.tolist() == BEYOND and ours.columns() == {}
    ours.project()
    assert theta.detach().numpy() == near(WITHIN)
    assert ours.master_of_all_heads().numpy() == near(WITHIN)
    found = ours.columns()
    assert torch.stack(list(found.values()), 1).numpy() == near(WITHIN)
    theta.data.copy_(torch.tensor(WITHIN) / 2 + 0.5)
    ours.project()  # the columns are those of the last projection alone
    assert [len(column) for column in ours.columns().values()] == [3, 3]


@pytest.mark.parametrize("published", [False, True])
def test_in_16_bits_the_master_is_deepspeeds(published):
    numerics = {"numerics": PublishedNumerics(torch.bfloat16)} if published else {}
    theta, master = nn.Parameter(torch.tensor(BEYOND).bfloat16()), torch.tensor(BEYOND) + 2**-20
    ours = trained([theta], with_masters((theta, master)), load("kerple_power", **numerics))
    assert torch.equal(ours.master(), master) and ours.master() is not master
    ours.project()
    assert theta.detach().float().numpy() == pytest.approx(torch.tensor(WITHIN).numpy(), rel=2**-8)
    if published:  # the released code clamps its 16-bit copy alone
        assert torch.equal(master, torch.tensor(BEYOND) + 2**-20)
    else:
        assert master.numpy() == pytest.approx(torch.tensor(WITHIN).numpy(), abs=1e-5)
    with pytest.raises(RuntimeError, match="not among the optimizer's parameters"):
        trained([nn.Parameter(torch.ones(3, 2))], ours.engine).master()


def test_each_head_is_gathered_and_shared_columns_stand_once():
    """FIRE's shared columns follow the bounds of their own columns, not those of a head's."""

    class Two(TensorGroup):
        def gather(self, tensor):
            return [tensor, tensor + 1]

    fire = load("fire")
    own = [p for p in fire.trained_parameters if not p.shared]
    shared = [p for p in fire.trained_parameters if p.shared]
    parts = [nn.Parameter(torch.full((2, len(own)), -9.0))]
    parts += [nn.Parameter(torch.full((1, len(shared)), -9.0))]
    groups = SimpleNamespace(model=Two(size=2))
    ours = trained(parts, pos=fire, groups=groups)
    ours.project()
    assert parts[0].tolist() == [[max(-9.0, p.low) for p in own]] * 2
    assert parts[1][0].tolist() == pytest.approx([max(-9.0, p.low) for p in shared])
    whole = ours.master_of_all_heads()
    assert whole.shape == (4, len(own) + len(shared))


def test_a_rank_without_theta_does_nothing():
    ours = trained([])
    ours.project()
    assert ours.master() is None and ours.master_of_all_heads() is None and ours.columns() == {}


def test_zero_3_writes_each_ranks_part_and_pads_the_last(monkeypatch):
    """Six numbers on 4 ranks are parts of 2: the last part is padding alone."""
    written = []
    theta = nn.Parameter(torch.empty(0))
    theta.ds_id, theta.ds_numel, theta.ds_shape = 1, 6, torch.Size([3, 2])
    theta.ds_tensor = torch.zeros(2)
    padded = torch.tensor([x for row in BEYOND for x in row] + [99.0, 99.0])
    monkeypatch.setattr(module, "safe_get_full_fp32_param", lambda _: padded)
    monkeypatch.setattr(
        module, "safe_set_local_fp32_param", lambda _, value: written.append(value.tolist())
    )
    gathered = []

    class Gathered:
        def __init__(self, parameters, modifier_rank, enabled):
            gathered.append((modifier_rank, enabled))

        def __enter__(self):
            theta.data = torch.zeros(3, 2)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(module.deepspeed.zero, "GatheredParameters", Gathered)
    for rank in range(4):
        groups = SimpleNamespace(replica_rank=rank, replica_size=4)
        ours = trained([theta], groups=groups)
        assert ours.master().tolist() == BEYOND
        ours.project()
        assert theta.detach().numpy() == near(WITHIN)
    assert gathered == [(0, True)] * 4
    assert written == [near(row) for row in WITHIN] + [[0.0, 0.0]]


def test_zero_1_writes_the_whole_master(monkeypatch):
    written = []
    theta = nn.Parameter(torch.tensor(BEYOND))
    theta._hp_mapping = object()
    monkeypatch.setattr(module, "safe_get_full_fp32_param", lambda _: torch.tensor(BEYOND))
    monkeypatch.setattr(module, "safe_set_full_fp32_param", lambda *given: written.append(given))
    trained([theta]).project()
    [(parameter, value)] = written
    assert parameter is theta and value.numpy() == near(WITHIN)
