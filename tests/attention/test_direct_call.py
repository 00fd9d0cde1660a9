"""`attend` from code of others: its defaults, and the mistakes that it must not compute through."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from megatron.attention import (
    AttentionError,
    Call,
    attend,
    choose,
    direct_call,
    starts_from_ids,
)
from megatron.attention import backend as backend_module
from megatron.attention.direct_call import DEBUG
from megatron.positional import (
    Combination,
    PositionalEmbedding,
    ThetaParameter,
    load,
    within_bounds,
)
from tests.helpers.paths import ROOT

KERPLE = load("kerple_log")


class Root(PositionalEmbedding):
    """b(d) = -a sqrt(d + 1). It sets no kind."""

    parameters = (ThetaParameter("a", low=0.0),)

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * torch.sqrt(d + 1)


class Half(PositionalEmbedding):
    """w(d) = 1 / (1 + a d)."""

    kind = "distance"
    parameters = (ThetaParameter("a", low=0.0),)

    def weight(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return 1 / (1 + a * d)


def inputs(queries=7, keys=7, size=8, value_size=8, heads=4, key_heads=4, batch=2):
    shapes = ((heads, queries, size), (key_heads, keys, size), (key_heads, keys, value_size))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, *x, generator=generator, dtype=torch.float64) for x in shapes]


def written_out(q, k, v, bias_HTS, scale):
    """Causal attention with a bias, without any code of ours."""
    mask = torch.ones(q.shape[2], k.shape[2]).tril().log().double()
    return F.scaled_dot_product_attention(q, k, v, bias_HTS + mask, scale=scale)


def distances(length=7):
    position = torch.arange(length)
    return (position[:, None] - position).clamp(min=0).double()


def test_a_class_without_a_kind_is_what_its_method_says():
    q, k, v = inputs()
    theta = torch.rand(4, 1, dtype=torch.float64)
    expected = written_out(q, k, v, -theta[:, :, None] * torch.sqrt(distances() + 1), 8**-0.5)
    for backend in ("eager", "blocked"):
        torch.testing.assert_close(attend(q, k, v, Root(), theta, backend=backend), expected)
    assert Root.kind == "distance" and Half.kind == "distance" and KERPLE.kind == "distance"


def test_two_classes_of_one_file_are_combined():
    q, k, v = inputs()
    both = Combination([Root(), Half()])
    assert both.name == "Root + Half" and [p.name for p in both.parameters] == ["Root.a", "Half.a"]
    theta = torch.rand(4, 2, dtype=torch.float64)
    a, b = theta[:, 0, None, None], theta[:, 1, None, None]
    scores = (q @ k.mT) * 8**-0.5 / (1 + b * distances()) - a * torch.sqrt(distances() + 1)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(attend(q, k, v, both, theta), scores.softmax(-1) @ v)


def test_arguments_in_another_order():
    q, k, v = inputs()
    for wrong in ("alibi", KERPLE.initial_theta(4), None, Root):
        with pytest.raises(
            AttentionError, match=r"fourth argument of attend\(q, k, v, pos, theta\) must be a pos"
        ):
            attend(q, k, v, wrong, KERPLE)
    with pytest.raises(AttentionError, match=r"not the class Root: write Root\(\)"):
        attend(q, k, v, Root, KERPLE)
    unused = attend(q, k, v, load("none"), KERPLE.initial_theta(4))
    torch.testing.assert_close(unused, attend(q, k, v, load("none")))


def test_queries_at_unknown_positions():
    q, k, v = inputs(queries=9)
    with pytest.raises(AttentionError, match="9 queries, but only 7 keys"):
        attend(q, k, v, KERPLE, KERPLE.initial_theta(4))
    q, k, v = inputs(queries=3)
    theta = KERPLE.initial_theta(4).double()
    with pytest.raises(AttentionError, match="query_offset=4 if .* or query_offset=0 if the first"):
        attend(q, k, v, KERPLE, theta)
    whole = attend(F.pad(q, (0, 0, 4, 0)), k, v, KERPLE, theta)
    torch.testing.assert_close(attend(q, k, v, KERPLE, theta, query_offset=4), whole[:, :, 4:])


@pytest.mark.parametrize("name", ["rotary", "rotary + kerple_log"])
def test_a_rotary_term_rotates(name):
    q, k, v = inputs()
    pos = load(name)
    theta = pos.initial_theta(4).double() if pos.parameters else None
    rotated = pos.rotate(q, k)
    expected = choose("eager", pos, device_type="cpu", dtype=q.dtype)(
        Call(*rotated, v, pos, theta, scale=8**-0.5)
    )
    got = attend(q, k, v, pos, theta)
    torch.testing.assert_close(got, expected)
    last = attend(q[:, :, 5:], k, v, pos, theta, query_offset=5)
    torch.testing.assert_close(last, got[:, :, 5:])
    shifted = torch.arange(7)[None].expand(2, -1) + 11
    torch.testing.assert_close(attend(q, k, v, pos, theta, positions_BT=shifted), got)
    with pytest.raises(AttentionError, match="rotate q and k by pos.turn"):
        attend(q[:, :, 5:], k, v, pos, theta, query_offset=5, positions_BT=shifted[:, 5:])


def test_ids_of_documents_are_not_starts(monkeypatch):
    q, k, v = inputs(batch=1)
    theta = KERPLE.initial_theta(4).double()
    ids = torch.tensor([[3, 3, 3, 5, 5, 1, 1]])
    starts = starts_from_ids(ids)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5]]
    got = attend(q, k, v, KERPLE, theta, starts_BS=starts)
    parts = [slice(0, 3), slice(3, 5), slice(5, 7)]
    alone = [attend(*(x[:, :, part] for x in (q, k, v)), KERPLE, theta) for part in parts]
    torch.testing.assert_close(got, torch.cat(alone, dim=2))
    for wrong, place in (
        ([0, 0, 0, 1, 1, 2, 2], "[0, 3] is 1"),
        ([0, 0, 0, 3, 3, 0, 0], "[0, 5] is 0"),
        ([0, 0, 2, 2, 6, 6, 6], "[0, 4] is 6"),
        ([0, 0, 0, 0, 0, 0, -1], "[0, 6] is -1"),
        ([0, 0, 0, 0, 0, 0, 99], "[0, 6] is 99"),
    ):
        with pytest.raises(
            AttentionError, match=r"starts_BS.*write starts_BS=starts_from_ids\(ids"
        ):
            attend(q, k, v, KERPLE, theta, starts_BS=torch.tensor([wrong]))
        with pytest.raises(AttentionError) as error:
            attend(q, k, v, KERPLE, theta, starts_BS=torch.tensor([wrong]))
        assert place in str(error.value), error.value
    assert DEBUG == "KERPLE_DEBUG"


def test_arguments_of_another_kind():
    q, k, v = inputs(queries=3)
    theta = KERPLE.initial_theta(4).double()
    for options, message in (
        ({"query_offset": torch.tensor([4, 3])}, "query_offset must be one whole number for all"),
        ({"query_offset": 4.0}, "query_offset must be one whole number .* not float"),
        ({"query_offset": 4, "window": True}, "window must be a whole number, .* not True"),
    ):
        with pytest.raises(AttentionError, match=message):
            attend(q, k, v, KERPLE, theta, **options)
    with pytest.raises(ValueError, match=r"ids must be \[batch, tokens\], not \[3\]: write ids"):
        starts_from_ids(torch.tensor([1, 1, 2]))
    for given in ((theta, KERPLE), (KERPLE.parameters, theta), (KERPLE, theta)):
        with pytest.raises(TypeError, match=r"write within_bounds\(theta, pos.parameters\), not"):
            within_bounds(*given)


@pytest.mark.parametrize("name", [*direct_call.HERE, "windows"])
def test_arguments_of_other_functions(name):
    hint = direct_call.HERE.get(name, "did you mean window? see help(attend)")
    with pytest.raises(TypeError, match=re.escape(f"attend has no argument {name}: {hint}")):
        attend(*inputs(), KERPLE, KERPLE.initial_theta(4), **{name: None})


def test_shapes_are_checked_once(monkeypatch):
    calls = []
    for module in (backend_module, direct_call):
        monkeypatch.setattr(module, "check_qkv", lambda *qkv: calls.append(1))
    attend(*inputs(), KERPLE, KERPLE.initial_theta(4).double())
    assert calls == [1]


@pytest.mark.parametrize("value_size", [3, 8, 11])
@pytest.mark.parametrize("name", ["kerple_log", "rotary + kerple_log"])
def test_values_of_another_head_size(value_size, name):
    q, k, v = inputs(value_size=value_size, key_heads=2)
    pos = load(name)
    theta = pos.initial_theta(4).double()
    probabilities = attend(q, k, torch.eye(7).double().expand(2, 2, 7, 7), pos, theta)
    for backend in ("eager", "blocked"):
        got = attend(q, k, v, pos, theta, backend=backend)
        torch.testing.assert_close(got, probabilities @ v.repeat_interleave(2, dim=1))


def test_a_batch_of_zero_has_gradients():
    q, k, v = (x[:0].requires_grad_() for x in inputs())
    theta = KERPLE.initial_theta(4).double().requires_grad_()
    out = attend(q, k, v, KERPLE, theta)
    out.sum().backward()
    assert out.shape == (0, 4, 7, 8) and theta.grad.tolist() == [[0.0, 0.0]] * 4


def test_autocast_with_mixed_dtypes():
    q, k, v = inputs()
    theta = KERPLE.initial_theta(4)
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(q.float(), k.bfloat16(), v.bfloat16(), KERPLE, theta)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, attend(*(x.bfloat16() for x in (q, k, v)), KERPLE, theta))
    with pytest.raises(AttentionError, match="one dtype"):
        attend(q.float(), k.bfloat16(), v.bfloat16(), KERPLE, theta)


def test_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 3, 4)])
    with pytest.raises(AttentionError, match="must not be nested tensors; pack the sequences"):
        attend(nested, nested, nested, KERPLE, KERPLE.initial_theta(2))


def test_a_scale_of_zero_is_refused():
    with pytest.raises(AttentionError, match=r"scale must be above 0, not 0\.0"):
        attend(*inputs(), KERPLE, KERPLE.initial_theta(4).double(), scale=0.0)


def test_one_compiled_graph_serves_all_lengths():
    theta = KERPLE.initial_theta(4)

    def call(q, k, v):
        return attend(q, k, v, KERPLE, theta)

    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend="eager")
    for length in (9, 13, 33):
        q, k, v = (x.float() for x in inputs(length, length))
        with torch.compiler.set_stance("default" if length == 9 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("name", ["kerple_log", "fire"])
def test_transforms_of_torch_func(name):
    q, k, v = inputs()
    pos = load(name)
    theta = pos.initial_theta(4).double()

    def loss(theta, q=q, backend="auto"):
        return attend(q, k, v, pos, theta, backend=backend).square().sum()

    leaf = theta.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(theta), leaf.grad)
    several = torch.stack([q, 2 * q])
    losses = torch.func.vmap(lambda q: loss(theta, q))(several)
    torch.testing.assert_close(losses, torch.stack([loss(theta, x) for x in several]))
    thetas = torch.stack([theta, 2 * theta])
    losses = torch.func.vmap(loss)(thetas)
    torch.testing.assert_close(losses, torch.stack([loss(each) for each in thetas]))
    with pytest.raises(AttentionError, match="blocked does not work in torch.func; use eager"):
        torch.func.grad(lambda theta: loss(theta, backend="blocked"))(theta)


def test_the_documented_model_learns():
    """The code of docs/own_code.md runs as it stands, and the model copies."""
    page = (ROOT / "docs" / "own_code.md").read_text()
    first, ways, second, third = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict = {}
    exec(first, found)
    assert found["theta"].grad.abs().min() > 0
    exec(ways, found)
    exec(third, found)
    q, k, v, theta, memory_k, memory_v = (
        found[name].double() for name in ("q", "k", "v", "theta", "memory_k", "memory_v")
    )
    p, a = theta.T[:, :, None, None]
    seen = q @ k.mT / 8 - p * torch.log1p(a * distances(512)) + torch.ones(512, 512).tril().log()
    logits = torch.cat([q @ memory_k.mT / 8, seen], dim=-1)
    exact = logits.softmax(-1) @ torch.cat([memory_v, v], dim=2)
    torch.testing.assert_close(found["merged"].double(), exact, rtol=0, atol=1e-5)
    found = {}
    exec(second, found)
    assert found["loss"].item() < 1.0  # a guess has log(16) = 2.77
    model = torch.compile(found["model"], fullgraph=True, backend="eager")
    tokens = found["tokens"]
    torch.testing.assert_close(model(tokens), found["model"](tokens))
    lines = [line for line in second.splitlines() if line.strip()]
    assert len(lines) < 50 and sum(len(line) > 100 for line in lines) == 0
