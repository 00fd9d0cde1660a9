"""Test that a call of fused attention only queues work, so that the host never waits for a GPU.

On the device "meta", all tensors are allocated and nothing is launched.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.attention import attend
from megatron.attention.fused import functions_of
from megatron.positional import PositionalEmbedding, ThetaParameter, load
from megatron.positional.hidden_layer import hidden_layer
from tests.helpers.terms import Case
from tests.kernels.test_kernels_terms import check

SHAPE = (2, 4, 40, 16)


class Network(PositionalEmbedding):
    """b(d) = sum_k v_k relu(w_k log(1 + d) + b_k): all parameters belong to the hidden layer."""

    parameters = tuple(ThetaParameter(f"{x}{k}") for x in "wbv" for k in range(3))

    def bias(self, theta_HN, d):
        w_HK, b_HK, v_HK = theta_HN.split(3, dim=1)
        d, first = self.columns(theta_HN[:, :1], d)
        return hidden_layer(torch.log1p(d) + 0 * first, w_HK, b_HK, v_HK)


class Waits(TorchDispatchMode):
    """Lists the operations for which a host waits for a GPU.

    They are an index that is a list or a mask, a number of a tensor, and a copy from the host.
    """

    NAMES = ("aten.index.", "aten.index_put", "scalar_dense", "nonzero", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, options, given = str(op), kwargs or {}, args[0] if args else None
        if isinstance(given, torch.Tensor):
            to_device = given.is_cpu and str(options.get("device")) == "meta"
            on_device = given.is_meta and any(x in name for x in self.NAMES)
            if on_device or ("_to_copy" in name and to_device):
                self.found.append(name)
        return op(*args, **options)


@pytest.mark.parametrize(
    "name",
    ["kerple_log", "fire", "rotary+kerple_log", "kerple_log+forget_gate", "sink+kerple_log3",
     "fire+rotary", "log_n+kerple_log", "alibi+kerple_power+rotary"],
)  # fmt: skip
def test_no_operation_waits(name):
    pos = load(name)

    def call():
        q, k, v = (torch.empty(SHAPE, device="meta", requires_grad=True) for _ in "qkv")
        theta = pos.initial_theta(SHAPE[1]).to("meta").requires_grad_()
        gates = {}
        if "forget_gate" in name:
            gates["decay_BHS"] = torch.empty(SHAPE[:3], device="meta", requires_grad=True)
        with Waits() as waits:
            out = attend(q, k, v, pos, theta, backend="fused", **gates)
            out.sum().backward()
        assert theta.grad.shape == theta.shape
        return waits.found

    call()  # the first call reads the formulas, on the CPU
    assert call() == []


def test_a_network_without_other_parameters_has_all_gradients():
    """In the interpreter, against eager attention in float64."""
    case = Case((), 1, 2, 21, 0, size=8)
    case.pos = Network()
    assert functions_of(case.pos)[1] == "evaluated in registers"
    theta = torch.randn(2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    case.inputs.insert(3, theta.requires_grad_())
    check(case, torch.float32)


def test_an_index_that_is_a_list_is_seen():
    x = torch.empty(4, 8, device="meta")
    with Waits() as waits:
        x[:, [1, 3]]
        x[:, 1:3]
        torch.zeros(3).to("meta")
    assert waits.found == ["aten.index.Tensor", "aten._to_copy.default"]
