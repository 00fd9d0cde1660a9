"""Test gradients of FlexAttention on a CPU, as far as possible, and when it is compiled.

torch refuses FlexAttention's backward pass on CPUs. These tests use two other parts of torch: a
dense backward pass for any device, and the check with which the generator of GPU code begins (it
decides which lookups may have a gradient). Both are imported late, as they take seconds and each
process of a parallel run reads this file.
"""

from __future__ import annotations

import functools

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


def inputs(queries, keys):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 16, generator=generator) for n in (queries, keys, keys)]


@pytest.fixture
def graphs(monkeypatch):
    """Return a list with an entry for each graph that is compiled."""
    found = []

    def counting(graph, _):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    yield found
    torch.compiler.reset()


def test_an_evaluation_without_compiled_models_still_compiles_attention(graphs):
    """Uncompiled, FlexAttention would need memory for all scores."""
    attention = flex.function_for.__wrapped__("cuda")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        out = attention(*inputs(128, 128))
    assert out.shape == (1, 2, 128, 16) and len(graphs) == 1


def test_a_compiled_model_may_contain_it(graphs):
    """Dynamo refuses to trace a change of the stance."""

    def model(*given):
        return flex.function_for.__wrapped__("cuda")(*given) + 1

    with torch.no_grad():
        assert torch.compile(model)(*inputs(128, 128)).shape == (1, 2, 128, 16)


def test_one_new_token_needs_no_graph_of_its_length(monkeypatch):
    """A generation would compile once for each token, up to the limit of torch."""
    monkeypatch.setattr(flex, "function_for", None)
    pos = load("kerple_log")
    theta = pos.initial_theta(2)
    for keys in (5, 6):
        call = (*inputs(1, keys), pos, theta)
        found, wanted = (attend(*call, query_offset=keys - 1, backend=x) for x in ("flex", "eager"))
        assert torch.equal(found, wanted)
    with pytest.raises(TypeError):
        attend(*inputs(2, 2), pos, theta, backend="flex")
