"""Test the model: conventions, theta, initial values, and a second implementation in float64."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.numerics import PublishedNumerics
from megatron.positional import load, names

VOCAB, LENGTH = 50, 12


def build(pos_emb="kerple_log", backend="eager", seed=1, shape=None, **block):
    pos = load(pos_emb)
    attend = choose(backend, pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(**({"hidden_size": 32, "num_heads": 4} | block))
    extra = {"num_layers": 2, "vocab_size": VOCAB, "max_positions": LENGTH} | (shape or {})
    return GPT(Plan(GPTShape(block=block, **extra), pos, attend, seed))


def tokens(n=2, length=LENGTH):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCAB, (n, length), generator=generator)


def rebuilt_logits(model, ids):
    """Compute logits by GPT-NeoX's formulas in plain loops, for kerple_log only."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    block = model.shape.block
    size, theta = block.head_size, p["embedding.theta"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], block.norm_eps)

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def attention(x, name):
        qkv = linear(x, f"{name}.query_key_value")
        heads = []
        for h in range(block.num_heads):
            q, k, v = (qkv[:, h * 3 * size + i * size :][:, :size] for i in range(3))
            rows = []
            for i in range(len(x)):
                d = torch.arange(i, -1, -1, dtype=torch.float64)
                bias = -theta[h, 0] * torch.log(1 + theta[h, 1] * d)
                scores = (k[: i + 1] @ q[i]) / math.sqrt(size) + bias
                rows.append(torch.softmax(scores, 0) @ v[: i + 1])
            heads.append(torch.stack(rows))
        return linear(torch.cat(heads, -1), f"{name}.dense")

    def mlp(x, name):
        return linear(F.gelu(linear(x, f"{name}.dense_h_to_4h")), f"{name}.dense_4h_to_h")

    out = []
    for row in ids:
        x = p["embedding.word_embeddings.weight"][row]
        for layer in range(model.shape.num_layers):
            name = f"layers.{layer}"
            attended = attention(norm(x, f"{name}.input_layernorm"), f"{name}.attention")
            if block.gpt_j_residual:
                x = x + attended + mlp(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
            else:
                x = x + attended
                x = x + mlp(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        x = norm(x, "final_norm")
        matrix = "embedding.word_embeddings" if model.output is None else "output"
        out.append(x @ p[f"{matrix}.weight"].T)
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("gpt_j_residual", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_a_rebuild_from_the_formulas(backend, gpt_j_residual, tied):
    model = build(
        backend=backend, gpt_j_residual=gpt_j_residual, shape={"tie_weights": tied}
    ).double()
    assert model.pos.parameters[0].name.endswith("p"), "the rebuild reads columns p, a"
    with torch.no_grad():
        for param in model.parameters():  # zero biases would hide a missing one
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.1)
    ids = tokens()
    torch.testing.assert_close(model(ids), rebuilt_logits(model, ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pos_emb", names())
def test_every_embedding_builds_and_is_causal(pos_emb):
    model = build(pos_emb).eval()
    ids = tokens()
    changed = ids.clone()
    changed[:, LENGTH // 2 :] = (changed[:, LENGTH // 2 :] + 1) % VOCAB
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, : LENGTH // 2], after[:, : LENGTH // 2])
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("pos_emb", [n for n in names() if load(n).kind == "distance"])
def test_theta_is_one_tensor_and_its_gradient_sums_over_the_layers(pos_emb):
    model = build(pos_emb).double()
    named = [name for name, _ in model.named_parameters() if "theta" in name]
    if not load(pos_emb).learnable:
        assert named == [] and model.theta is None
        return
    shared = any(p.shared for p in load(pos_emb).parameters)
    assert named == ["embedding.theta", "embedding.shared_theta"][: 1 + shared]
    ids = tokens()
    model(ids, ids).mean().backward()
    whole = [theta.grad.clone() for theta in model.theta_parts]
    assert all((grad.abs() > 0).any() for grad in whole)
    parts = [torch.zeros_like(grad) for grad in whole]
    for chosen in range(2):  # each layer's share: the other layer reads a detached copy
        model.zero_grad()
        x, theta = model.embedding(ids)
        for i, layer in enumerate(model.layers):
            x = layer(x, theta if i == chosen else theta.detach())
        F.cross_entropy(model.output(model.final_norm(x)).flatten(0, 1), ids.flatten()).backward()
        for part, theta in zip(parts, model.theta_parts, strict=True):
            part += theta.grad
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-14)


def test_theta_is_emitted_in_fp32_under_bf16_and_fixed_slopes_are_not_rounded():
    model = build("kerple_log").bfloat16()
    _, theta = model.embedding(tokens())
    assert theta.dtype == torch.float32 and model.theta.dtype == torch.bfloat16
    exact = build("alibi", num_heads=8, hidden_size=64)
    rounded = build("alibi", num_heads=8, hidden_size=64).bfloat16()
    assert torch.equal(exact.embedding(tokens())[1], rounded.embedding(tokens())[1])


def test_initial_values_depend_on_seed_and_name_alone():
    shallow, deep = build(), build(shape={"num_layers": 2, "tie_weights": True})
    for name, value in deep.state_dict().items():
        assert torch.equal(value, shallow.state_dict()[name]), name
    assert not torch.equal(build(seed=2).theta, shallow.theta)


def test_residual_outputs_use_the_output_init():
    model = build(shape={"init_method": "normal", "output_init_method": "wang_init"})
    layer = model.layers[0]
    assert abs(layer.attention.query_key_value.weight.std().item() - 0.02) < 0.002
    wang = 2 / 2 / math.sqrt(32)
    assert abs(layer.attention.dense.weight.std().item() / wang - 1) < 0.1
    assert abs(layer.mlp.dense_4h_to_h.weight.std().item() / wang - 1) < 0.1
    assert (layer.mlp.dense_4h_to_h.bias == 0).all()
    assert (layer.input_layernorm.weight == 1).all()


PLAIN = ("gelu", "relu", "softsign", "swish", "mish")
GATED = ("geglu", "swiglu", "reglu", "glu", "bilinear")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [*PLAIN, *GATED])
def test_activations(activation, bias):
    inner_size = 21 if activation in ("swiglu", "relu") else None
    mlp = build(activation=activation, inner_size=inner_size, mlp_bias=bias).layers[0].mlp.double()
    assert len(list(mlp.parameters())) == (4 if bias else 2)
    x = torch.randn(3, 32, dtype=torch.float64)
    inner = x @ mlp.dense_h_to_4h.weight.T
    if bias:  # zero biases would hide a missing one
        with torch.no_grad():
            for layer in (mlp.dense_h_to_4h, mlp.dense_4h_to_h):
                layer.bias.uniform_(-1, 1)
        inner = inner + mlp.dense_h_to_4h.bias
    value, gate = inner.chunk(2, -1)
    expected = {
        "gelu": lambda: inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))),
        "geglu": lambda: value * (gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))),
        "swiglu": lambda: value * gate / (1 + torch.exp(-gate)),
        "reglu": lambda: value * gate.clamp(min=0),
        "glu": lambda: value / (1 + torch.exp(-gate)),
        "bilinear": lambda: value * gate,
        "relu": lambda: inner.clamp(min=0),
        "softsign": lambda: inner / (1 + inner.abs()),
        "swish": lambda: inner / (1 + torch.exp(-inner)),
        "mish": lambda: inner * torch.tanh(torch.log1p(torch.exp(inner))),
    }[activation]()
    width = inner_size or (int(8 / 3 * 32) if activation == "geglu" else 128)
    assert inner.shape[-1] == (2 if activation in GATED else 1) * width
    out = expected @ mlp.dense_4h_to_h.weight.T + (mlp.dense_4h_to_h.bias if bias else 0)
    torch.testing.assert_close(mlp(x), out, rtol=0, atol=1e-12)


def test_tanh_gelu_is_the_approximation():
    mlp = build(tanh_gelu=True).layers[0].mlp
    x = torch.linspace(-3, 3, 32)
    torch.testing.assert_close(mlp.activate(x), F.gelu(x, approximate="tanh"))
    assert not torch.equal(mlp.activate(x), F.gelu(x))


def test_recomputing_blocks_changes_no_gradient():
    grads = []
    for recompute in (False, True):
        model = build(shape={"checkpoint_activations": recompute}).train()
        ids = tokens()
        model(ids, ids).mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_losses_in_pieces_equal_losses_at_once(monkeypatch):
    model = build().eval()
    ids = tokens()
    whole = model(ids, ids).detach()
    monkeypatch.setattr("megatron.parallel.loss.LOGITS_AT_ONCE", 2 * VOCAB * 5)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, ids), whole)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_losses_in_pieces_equal_those_of_the_formula(monkeypatch, z_loss, tied):
    """The reference needs all logits; a piece holds 5 positions, and the last one 2."""
    found = []
    for limit in (2 * VOCAB * 5, None):
        model = build(shape={"tie_weights": tied}).double()
        model.z_loss, ids = z_loss, tokens()
        if limit:
            monkeypatch.setattr("megatron.parallel.loss.LOGITS_AT_ONCE", limit)
            losses = model(ids, ids.roll(1))
        else:
            logits = model(ids)
            lse = logits.logsumexp(-1)
            losses = lse - logits.gather(-1, ids.roll(1)[..., None])[..., 0] + z_loss * lse**2
        (losses * torch.arange(1, 1 + losses.numel()).view_as(losses)).sum().backward()
        found.append([losses.detach(), *(p.grad for p in model.parameters())])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-10)
    with torch.no_grad():  # not in an evaluation
        plain = -model(ids).log_softmax(-1).gather(-1, ids.roll(1)[..., None])[..., 0]
        torch.testing.assert_close(model(ids, ids.roll(1)), plain, rtol=0, atol=1e-12)


def test_learned_positions_end_with_an_explanation():
    with pytest.raises(ValueError, match="max_position_embeddings.*kerple_log"):
        build("learned")(tokens(length=LENGTH + 1))


def test_dropout_acts_in_training_only():
    model = build(hidden_dropout=0.3, attention_dropout=0.3)
    ids = tokens()
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_learned_positions_are_shifted_within_the_tables_rows():
    """As in GPT-NeoX, the offset changes which rows are used but adds no rows."""
    model = build("learned", shape={"max_positions": LENGTH + 2, "position_offset": 2})
    table = model.embedding.position_embeddings.weight
    assert table.shape == (LENGTH + 2, 32)
    x, _ = model.embedding(tokens())
    words = model.embedding.word_embeddings(tokens())
    torch.testing.assert_close(x - words, table[2:].expand_as(x), rtol=0, atol=1e-6)
    text = f"has {LENGTH} positions, but a sequence of {LENGTH + 1} came in; give shorter --lengths"
    with pytest.raises(ValueError, match=text):
        model.embedding(tokens(length=LENGTH + 1))


def test_tanh_gelu_is_the_published_one_in_float64():
    model = build(activation="gelu", tanh_gelu=True).double()
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    expected = [0.5 * v * (1 + math.tanh(0.79788456 * v * (1 + 0.044715 * v * v))) for v in x]
    got = model.layers[0].mlp.activate(x)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (got - F.gelu(x, approximate="tanh")).abs().max() > 1e-10


def test_without_biases_a_block_is_that_with_zero_biases():
    whole, without = build(), build(attention_bias=False, mlp_bias=False)
    absent = whole.state_dict().keys() - without.state_dict().keys()
    assert len(absent) == 8 and all(re.search(r"(attention|mlp)\..*\.bias$", n) for n in absent)
    assert torch.equal(whole(tokens()), without(tokens()))


@pytest.mark.parametrize("activation", ["swish", "mish"])
def test_published_rounding_is_that_of_each_operation(activation):
    mlp = build(activation=activation, numerics=PublishedNumerics(torch.bfloat16)).layers[0].mlp
    x = torch.linspace(-6, 6, 301, dtype=torch.bfloat16)
    gate = torch.sigmoid(x) if activation == "swish" else torch.tanh(F.softplus(x))
    assert torch.equal(mlp.activate(x), x * gate)
    assert not torch.equal(build(activation=activation).layers[0].mlp.activate(x), x * gate)


@pytest.mark.parametrize("pos_emb", ["kerple_log", "fire + learned", "alibi"])
def test_meta_model(pos_emb):
    """A model on the meta device has the same names and shapes, and no values."""
    with torch.device("meta"):
        empty = build(pos_emb).state_dict()
    full = build(pos_emb).state_dict()
    assert all(value.is_meta for value in empty.values())
    assert {k: v.shape for k, v in empty.items()} == {k: v.shape for k, v in full.items()}
