"""Test gradients of FlexAttention on a CPU, as far as possible.

torch refuses FlexAttention's backward pass on CPUs. These tests use two other parts of torch: a
dense backward pass for any device, and the check with which the generator of GPU code begins (it
decides which lookups may have a gradient). Both are imported late, as they take seconds and each
process of a parallel run reads this file.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from megatron.attention import attend, flex
from megatron.attention.call import Call, lowered
from megatron.positional import load

STARTS = torch.tensor([0] * 11 + [11] * 29)
TERMS = {
    "kerple_log": {},
    "kerple_power_add_mul": {},
    "rpe": {"window": 9},
    "sink": {"starts_BS": STARTS[None]},
    "kerple_log + sink": {"decay_BHS": -torch.linspace(0, 4, 80).double().view(1, 2, 40).square()},
}


@pytest.mark.parametrize("name", TERMS)
def test_gradients_of_the_compiled_function(name, monkeypatch):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.kernel.flex.flex_attention import validate_joint_graph

    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    options = {"dynamic": False, "fullgraph": True, "backend": backend}
    compiled = torch.compile(flex_attention.flex_attention, **options)
    monkeypatch.setattr(flex, "function_for", lambda device_type: compiled)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *inputs: None)
    pos = load(name)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 40, 16, generator=generator).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v, pos.initial_theta(2, generator) + 0.1)]
    options = {"scale": 0.3, **TERMS[name]}
    if "decay_BHS" in options:
        inputs.append(options["decay_BHS"].requires_grad_())
    call = lowered(Call(*inputs[:3], pos, inputs[3], **options), grouped=True)
    out = flex.flex(call)
    expected = attend(*inputs[:3], pos, inputs[3], backend="eager", **options)
    gradients = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    for got, exact in zip(*gradients, strict=True):
        assert (got - exact).abs().max() < 2e-6 * max(1.0, exact.abs().max())
    compiled_once = len(graphs)
    again = flex.flex(call)
    assert torch.equal(again, out) and len(graphs) == compiled_once
    joint = [
        module.graph
        for graph in graphs
        for part, module in graph.named_modules()
        if part.startswith("joint_graph")
    ]
    assert joint, "no backward pass was traced"
    for graph in joint:
        validate_joint_graph(graph)


def test_an_evaluation_in_inference_mode_may_come_first():
    """Masks that it caches can be saved for the backward passes of later calls."""
    flex.causal_mask.cache_clear()
    with torch.inference_mode():
        mask = flex.causal_mask(40, 40, 0, torch.device("cpu"))
    assert not mask.kv_indices.is_inference()


@pytest.mark.parametrize("size,stages", [(64, {"fwd": 2}), (128, {"fwd": 1, "bwd": 2})])
def test_what_is_looked_up_is_not_copied_three_stages_ahead(size, stages):
    options = {f"{key}_num_stages": value for key, value in stages.items()}
    assert flex.kernel_options(load("rpe"), size) == options
    assert flex.kernel_options(load("kerple_log"), size) is None
    assert flex.kernel_options(load("none"), size) is None
