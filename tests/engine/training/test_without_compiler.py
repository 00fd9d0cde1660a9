"""Test that torch's optimizers compute the same without torch's compiler."""

from __future__ import annotations

import pytest
import torch

from megatron.engine.training.without_compiler import without_compiler


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_weights_and_state_are_those_of_torchs_class(optimizer, options):
    found = []
    for kind in (optimizer, without_compiler(optimizer)):
        weight, calls = torch.nn.Parameter(torch.arange(6.0).view(2, 3)), []
        made = kind([weight], **options)
        made.register_step_post_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        for step in range(3):
            (weight * (step + 1)).pow(2).sum().backward()
            made.step()
            made.zero_grad()
        again = kind([torch.nn.Parameter(torch.zeros(2, 3))], **options)
        again.load_state_dict(made.state_dict())
        again.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        state = again.state_dict()["state"][0].values()
        found.append([weight.detach(), weight.grad, calls, len(again.param_groups), *state])
        assert isinstance(made, optimizer) and type(made).__name__ == optimizer.__name__
    for theirs, ours in zip(*found, strict=True):
        same = torch.equal(theirs, ours) if torch.is_tensor(theirs) else theirs == ours
        assert same, (theirs, ours)
    assert found[0][2] == [True] * 3


def test_torchs_own_class_stays_as_it_is():
    before = dict(vars(torch.optim.SGD))
    without_compiler(torch.optim.SGD)([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
    assert dict(vars(torch.optim.SGD)) == before
