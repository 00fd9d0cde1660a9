"""Test the operations of `torch.library`, and that `torch.compile` keeps attention in one graph."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.attention import AttentionError, Call, attend, blocked, choose, fused, operations
from megatron.model import GPT, BlockShape, Documents, GPTShape, LayerAttention, Plan
from megatron.positional import PositionalEmbedding, ThetaParameter, load
from tests.helpers.terms import Case

CASES = {
    "kerple_log": (("bias",), {}),
    "cross": (("bias", "decay", "documents", "window"), {"dropout_p": 0.3}),
    "table": (("weight", "table", "decay", "sink"), {}),
}
BACKENDS = ("blocked", "fused")
ONE_GRAPH = {"fullgraph": True, "backend": "aot_eager"}


class Root(PositionalEmbedding):
    """A reader's own bias: b(d) = -a sqrt(d)."""

    kind = "distance"
    parameters = (ThetaParameter("a", low=0.0),)

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * torch.sqrt(d)


def single(name, **shape):
    """Return a case, its inputs in fp32, and its options."""
    terms, options = CASES[name]
    case = Case(terms, **{"batch": 1, "size": 8} | shape)
    inputs = [x.detach().float().requires_grad_() for x in case.inputs[:4]]
    return case, inputs + case.inputs[4:], options


class Recorder(TorchDispatchMode):
    """Records the calls of the operations."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kerple":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", (blocked, fused))
def test_torch_accepts_the_operations(module, name, monkeypatch):
    """Their results have the bits of the eager call."""
    case, inputs, options = single(name, heads=1, queries=5)
    backend, results, recorder = module.BACKEND.name, [], Recorder()
    for mode in (nullcontext(), recorder):
        torch.manual_seed(5)
        with mode:
            results.append(case.run(backend, inputs, **options))
        monkeypatch.setattr(module, "is_compiling", lambda: True)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    forward, _ = recorder.calls
    assert forward.name() == f"kerple::{backend}"
    for operation, args in recorder.calls.items():
        args = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        for x in args:
            if operation is forward and isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(operation, tuple(args))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph(backend, name):
    case, inputs, options = single(name, queries=19)

    def function(*inputs):
        return case.out(backend, [inputs[0] * 2, *inputs[1:]], **options) + 1

    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, **ONE_GRAPH)):
        torch.manual_seed(5)
        out = call(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, case.grad.float())])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    if name == "cross":
        assert torch._dynamo.explain(function)(*inputs).graph_break_count == 0


@pytest.mark.parametrize("training", (True, False))
def test_what_rounding_lost_is_kept_only_for_a_backward_pass(training, monkeypatch):
    """In fp16, the operation has the bits of the eager call and the shapes that torch expects."""
    case = Case(("bias",), 1, 1, 5, size=8)
    inputs = [x.detach().half() for x in case.inputs[:3]] + [case.inputs[3].detach().float()]
    inputs = [x.requires_grad_(training) for x in inputs]
    kept, recorder, forward = [], Recorder(), operations.fused_forward

    def spy(*args):
        kept.append(forward(*args))
        return kept[-1]

    monkeypatch.setattr(operations, "fused_forward", spy)
    out = case.out("fused", inputs)
    monkeypatch.setattr(fused, "is_compiling", lambda: True)
    with recorder:
        assert torch.equal(case.out("fused", inputs), out)
    with torch.no_grad():
        assert torch.equal(case.out("fused", inputs), out)
    shapes = [tuple(lost.shape) for _, _, lost in kept]
    assert shapes == [(int(training), 1, 5, 8)] * 2 + [(0, 1, 5, 8)]
    ((operation, args),) = recorder.calls.items()
    torch.library.opcheck(operation, tuple(args))


def test_fire_breaks_the_graph_only_in_blocked():
    """Without `fullgraph` it has the same bits; one query without gradients needs no break."""
    pos = load("fire", width=2)
    qkv, theta = torch.randn(3, 1, 1, 9, 8), pos.initial_theta(1).requires_grad_()

    def function(backend, queries, theta):
        q, k, v = qkv.unbind()
        last = {"query_offset": 9 - queries, "backend": backend}
        return attend(q[:, :, 9 - queries :], k, v, pos, theta, scale=0.3, **last)

    whole, broken = torch.compile(function, **ONE_GRAPH), torch.compile(function, backend="eager")
    for backend, compiled in (("fused", whole), ("blocked", broken)):
        torch._dynamo.reset()
        outs = [call(backend, 9, theta) for call in (function, compiled)]
        grads = [torch.autograd.grad(out.sum(), theta)[0] for out in outs]
        assert torch.equal(*outs) and torch.equal(*grads)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(whole("blocked", 1, theta), function("blocked", 1, theta))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole("blocked", 9, theta)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_serves_its_own_embedding_alone(backend):
    """Two embeddings of one class and of equal shapes give other numbers in compiled code, too."""
    near = load("kerple_log")
    q, k, v = torch.randn(3, 1, 2, 19, 8).unbind()
    theta = near.initial_theta(2)

    def function(pos):
        return attend(q, k, v, pos, theta, scale=0.3, backend=backend)

    torch._dynamo.reset()
    compiled, outs = torch.compile(function, **ONE_GRAPH), []
    for pos in (near, near.scaled(3.0), near):
        outs.append(compiled(pos))
        assert torch.equal(outs[-1], function(pos))
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_the_readers_own(backend):
    q, k, v = torch.randn(3, 1, 2, 19, 8).unbind()
    theta, poss = torch.rand(2, 1, requires_grad=True), (Root(), load("alibi_learned"))

    def function(theta, pos):
        return attend(q, k, v, pos, theta, scale=0.3, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(function, **ONE_GRAPH)
    for pos in poss:  # one graph for each
        out, expected = compiled(theta, pos), function(theta, pos)
        assert torch.equal(out, expected)
        (got,), (exact,) = (torch.autograd.grad(x.sum(), theta) for x in (out, expected))
        assert torch.equal(got, exact)


def test_a_model():
    pos = load("rotary + kerple_log + forget_gate")
    chosen = choose("fused", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=16, num_heads=2, attention_dropout=0.2, hidden_dropout=0.2)
    layers = (LayerAttention(pos, chosen, slice(None), 7),)
    shape, documents = GPTShape(1, 32, block, 23), Documents(7, restart_positions=True)
    model = GPT(Plan(shape, pos, chosen, seed=1, layers=layers, documents=documents))
    tokens = torch.randint(32, (1, 19))
    torch._dynamo.reset()
    results = []
    for call in (model, torch.compile(model, **ONE_GRAPH)):
        torch.manual_seed(5)
        out = call(tokens)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert not results[0][0].isnan().any()


def test_what_is_refused_is_refused_while_compiling():
    pos, q = load("kerple_log"), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    chosen, theta = choose("fused", pos, device_type="cpu", dtype=torch.float32), torch.ones(2, 2)
    for function in (
        lambda q: attend(q, q, q, pos, theta, scale=0.3, backend="fused"),
        lambda q: chosen(Call(q, q, q, pos, theta, scale=0.3)),
    ):
        with pytest.raises(RuntimeError, match="AttentionError.* does not serve torch.float64"):
            torch.compile(function, backend="aot_eager")(q)


def test_unknown_device_functions_are_refused():
    q = torch.randn(1, 1, 5, 8)
    with pytest.raises(AttentionError, match="no device functions 'other 12'"):
        torch.ops.kerple.fused(q, q, q, q[0, 0], *[None] * 5, "other 12", 0.3, 0, 0.0, True)


def test_what_reads_on_the_host_stays_out_of_cuda_graphs():
    operations = torch.ops.kerple
    for name in ("blocked", "blocked_backward", "fused", "fused_backward"):
        unsafe = torch.Tag.cudagraph_unsafe in getattr(operations, name).default.tags
        assert unsafe == name.startswith("blocked")
