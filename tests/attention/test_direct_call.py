"""`attend` from code of others: its defaults, and the mistakes that it must not compute through."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.attention import AttentionError, attend, choose, score_mod_of, starts_from_ids
from megatron.attention.direct_call import DEBUG
from megatron.attention.formulas import trace
from megatron.positional import Combination, PositionalEmbedding, ThetaParameter, load
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
            AttentionError, match=r"fourth argument .*: attend\(q, k, v, pos, theta"
        ):
            attend(q, k, v, wrong, KERPLE)
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
        *rotated, v, pos, theta, scale=8**-0.5
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


def test_an_embedding_does_not_change():
    pos = load("rpe")
    with pytest.raises(AttributeError, match="scale of Rpe cannot change after construction"):
        pos.scale = 3.0
    assert pos.changed(distance_scale=2.0).distance_scale == 2.0 and pos.distance_scale == 1.0


def test_equal_embeddings_share_what_was_read():
    trace.read.cache_clear()
    for _ in range(5):
        trace.read(Root())
        trace.read(load("kerple_log + alibi"))
    assert trace.read.cache_info().misses == 2
    assert load("rpe", num_buckets=16) != load("rpe") == load("rpe") != load("alibi")
    assert KERPLE.scaled(2.0) == KERPLE.scaled(2.0) != KERPLE
    for again in (copy.deepcopy(KERPLE), pickle.loads(pickle.dumps(KERPLE))):
        assert again == KERPLE and hash(again) == hash(KERPLE)


class Bare(Root):
    """Its gradient at distance 0 is 0 * inf."""

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -torch.sqrt(a * d)


class Where(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return torch.where(d > 0, -torch.sqrt(a * d), 0.0)


class Flat(Root):
    def bias(self, theta_HN, d):
        return -theta_HN[:, 0] * d.sum()


@pytest.mark.parametrize(
    "pos, theta, message",
    [
        (KERPLE.scaled(0.5), [[0.5, 0.5], [0.5, 0.001]],
         r"theta's column bias_a is 0.001 in head 1, but must lie in \[0.01, inf\]; clamp"),
        (KERPLE.scaled(0.25), [[0.5, 0.5], [float("nan"), 1]], "theta's column bias_p is nan in"),
        (Bare(), [[1.0], [2.0]], r"Bare.bias: its gradient .* at distance 0 is NaN for theta \[1"),
        (Where(), [[1.0], [2.0]], "torch.where does not help"),
        (Flat(), [[1.0], [2.0]], r"Flat.bias has returned the shape \[2\] for 2 heads"),
    ],
)  # fmt: skip
def test_the_first_call_checks_formula_and_theta(pos, theta, message):
    q, k, v = inputs(heads=2, key_heads=1)
    with pytest.raises(AttentionError, match=message):
        attend(q, k, v, pos, torch.tensor(theta))


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


@pytest.mark.parametrize("pos", [Combination([Root(), Half()]), load("rpe")])
def test_a_formula_for_flex_attention(pos):
    q, k, v = inputs(queries=3)
    theta = pos.initial_theta(4).double()
    score_mod = score_mod_of(pos, theta, length=7, offset=4)
    mask = create_block_mask(lambda b, h, i, j: i + 4 >= j, None, None, 3, 7, device="cpu")
    got = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    torch.testing.assert_close(got, attend(q, k, v, pos, theta, query_offset=4))


def test_one_compiled_graph_serves_all_lengths():
    theta = KERPLE.initial_theta(4)

    def call(q, k, v):
        return attend(q, k, v, KERPLE, theta)

    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend="eager")
    for length in (9, 13, 33):
        q, k, v = (x.float() for x in inputs(length, length))
        with torch.compiler.set_stance("default" if length == 9 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_transforms_of_torch_func():
    q, k, v = inputs()
    theta = KERPLE.initial_theta(4).double()

    def loss(theta, q=q, backend="auto"):
        return attend(q, k, v, KERPLE, theta, backend=backend).square().sum()

    leaf = theta.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(theta), leaf.grad)
    several = torch.stack([q, 2 * q])
    losses = torch.func.vmap(lambda q: loss(theta, q))(several)
    torch.testing.assert_close(losses, torch.stack([loss(theta, x) for x in several]))
    with pytest.raises(AttentionError, match="blocked does not work in torch.func; use eager"):
        torch.func.grad(lambda theta: loss(theta, backend="blocked"))(theta)


def test_the_documented_model_learns():
    """The code of docs/attention.md runs as it stands, and the model copies."""
    page = (ROOT / "docs" / "attention.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict = {}
    exec(first, found)
    assert found["theta"].grad.abs().min() > 0
    found = {}
    exec(second, found)
    assert found["loss"].item() < 1.0  # a guess has log(16) = 2.77
    model = torch.compile(found["model"], fullgraph=True, backend="eager")
    tokens = found["tokens"]
    torch.testing.assert_close(model(tokens), found["model"](tokens))
    lines = [line for line in second.splitlines() if line.strip()]
    assert len(lines) < 50 and sum(len(line) > 100 for line in lines) == 0
