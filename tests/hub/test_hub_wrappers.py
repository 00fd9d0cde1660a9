"""Test the wrappers of torch that trainers put around an export on several GPUs."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from megatron.model.norm import Norm
from tests.helpers.hub import model_of, tokens
from tests.helpers.launch import run_ranks

KINDS = ["layernorm", "rmsnorm", "fused_rmsnorm", "scalenorm"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_of_data_parallel_has_the_weights_of_its_norm(kind):
    """torch.nn.parallel.replicate gives a replica its tensors as attributes, not as parameters."""
    norm, x = Norm(kind, 8, 1e-5), torch.randn(3, 8)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand_like(parameter))
    replica = norm._replicate_for_data_parallel()
    for name, parameter in norm.named_parameters():
        setattr(replica, name, parameter.detach().clone().requires_grad_())
    assert not replica._parameters and torch.equal(replica(x), norm(x))


def wrapped(version, dtype, own_parameters):
    """Return an export as accelerate wraps it: a unit for each class of `_no_split_modules`."""
    model = model_of(dtype=dtype).train()
    named = getattr(model, "_no_split_modules")  # noqa: B009  what accelerate reads
    kinds = {type(x) for x in model.modules() if type(x).__name__ in named}
    assert {kind.__name__ for kind in kinds} == {"Block", "Theta"}
    if version == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=own_parameters,
            device_id=torch.device("cpu"),
        )  # fmt: skip
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in [x for x in model.modules() if type(x) in kinds]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(groups, version, dtype, own_parameters=True):
    """Return the losses of three steps on this rank."""
    torch.manual_seed(0)
    model = wrapped(version, dtype, own_parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids, found = tokens(2, 9)[[groups.rank]], []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def all_cells(groups):
    """Return the losses of each version, dtype and kind of parameters on this rank."""
    full, half = torch.float32, torch.bfloat16
    cells = [(1, full), (1, full, False), (1, half), (2, full), (2, half)]
    return [losses(groups, *cell) for cell in cells]


def test_fsdp_trains_theta_and_weights_of_another_dtype():
    """Theta stays in fp32, so it needs a unit of its own beside bf16 weights."""
    torch.manual_seed(0)
    model = model_of().train()
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(3):
        loss = model(tokens(2, 9), labels=tokens(2, 9)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for first, second in zip(*run_ranks(2, all_cells), strict=True):
        mean = [(x + y) / 2 for x, y in zip(first, second, strict=True)]
        assert mean == pytest.approx(wanted, rel=2e-2)
    assert wanted[2] < wanted[0]
