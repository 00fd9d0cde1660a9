"""Test the options of a block against a second implementation in float64, gradients included."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megatron.attention import choose
from megatron.model import GPT, BlockShape, Documents, GPTShape, LayerAttention, Plan
from megatron.positional import PositionalError, load

VOCAB, LENGTH, END = 40, 24, 7
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}
LLAMA3 = YARN | {"rope_type": "llama3"}
LLAMA = {
    "hidden_size": 48,
    "num_heads": 6,
    "num_kv_heads": 2,
    "norm": "rmsnorm",
    "norm_eps": 1e-2,  # so large that its place shows
    "activation": "swiglu",
    "inner_size": 37,
    "attention_bias": False,
    "mlp_bias": False,
    "rotary_base": 100.0,
}
CASES = {
    "llama": LLAMA,
    "llama, epsilon inside": LLAMA | {"fused_norm": True},
    "one key head": LLAMA | {"num_kv_heads": 1},
    "norm of q and k": LLAMA | {"qk_norm": True},
    "layernorm of q and k": LLAMA | {"qk_norm": True, "norm": "layernorm", "num_kv_heads": None},
    "scalenorm of q and k": LLAMA | {"qk_norm": True, "norm": "scalenorm"},
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "rotary_pct": 0.5},
    "shared norms of q and k, large heads": LLAMA
    | {"qk_norm": True, "qk_norm_kind": "shared", "head_dim": 16, "output_gate": True},
    "joined norms of q and k": LLAMA
    | {"qk_norm": True, "qk_norm_kind": "joined", "fused_norm": True, "output_norms": True},
    "shared layernorms, one norm of two branches": LLAMA
    | {"qk_norm": True, "qk_norm_kind": "shared", "norm": "layernorm", "qkv_bias": True}
    | {"gpt_j_residual": True, "gpt_j_tied": True},
    "output gate": LLAMA | {"output_gate": True},
    "output gate with a bias": LLAMA | {"output_gate": True, "attention_bias": True},
    "everything": LLAMA
    | {"qk_norm": True, "fused_norm": True, "gpt_j_residual": True, "output_gate": True},
}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "yarn": YARN,
    "yarn, own temperature": YARN | {"attention_factor": 1.3, "beta_fast": 3.0, "beta_slow": 0.3},
    "llama3": LLAMA3,
}


def build(backend="eager", scaling=None, documents=None, **block):
    pos = load("rotary", **(scaling or {}))
    masked = documents is not None
    attend = choose(backend, pos, device_type="cpu", dtype=torch.float64, masked=masked)
    shape = GPTShape(2, VOCAB, BlockShape(**block), LENGTH, tie_weights=True)
    layers = (LayerAttention(pos, attend, slice(None)),) * 2
    model = GPT(Plan(shape, pos, attend, 1, layers=layers, documents=documents)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # so that each weight counts, also biases and those of norms
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=generator), alpha=0.3)
    return model


def tokens():
    return torch.randint(8, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def angles(ndims, base, scaling):
    """Return (angle per position of each pair, factor of rotated numbers), in plain numbers."""
    s, kind = scaling.get("factor", 1.0), scaling.get("rope_type")
    length = scaling.get("original_max_position_embeddings", 0)
    if kind == "ntk":
        base *= s ** (ndims / (ndims - 2))
    # as in published models, frequencies are rounded to fp32
    f = [(1 / torch.tensor(base) ** (2 * m / ndims)).item() for m in range(ndims // 2)]
    if kind == "linear":
        return [x / s for x in f], 1.0
    if kind == "llama3":
        turns = [length * x / (2 * math.pi) for x in f]
        kept = [min(1.0, max(0.0, (n - 1) / 3)) for n in turns]
        return [x * k + x / s * (1 - k) for x, k in zip(f, kept, strict=True)], 1.0
    if kind == "yarn":
        fast, slow = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
        # base^(-2m/ndims) length = 2 pi turns, solved for m
        at = [ndims / 2 * math.log(length / (2 * math.pi * n), base) for n in (fast, slow)]
        low, high = max(math.floor(at[0]), 0), min(math.ceil(at[1]), ndims - 1)
        ramp = [min(1.0, max(0.0, (m - low) / (high - low))) for m in range(len(f))]
        mixed = [x * (1 - r) + x / s * r for x, r in zip(f, ramp, strict=True)]
        return mixed, scaling.get("attention_factor", 0.1 * math.log(s) + 1)
    return f, 1.0


def rescaled(p, b, x, name, heads=1):
    """Return the norm of x, with the weights that begin with `name`."""
    if b.norm == "scalenorm":
        return x / x.norm(dim=-1, keepdim=True).clamp(min=b.norm_eps) * p[f"{name}.g"]
    if b.norm == "layernorm":
        x = (x - x.mean(-1, True)) / (x.var(-1, keepdim=True, correction=0) + b.norm_eps).sqrt()
        weight, bias = (p[f"{name}.{each}"].view(heads, -1) for each in ("weight", "bias"))
        return x * weight + bias
    mean = x.square().mean(-1, True)
    root = (mean + b.norm_eps).sqrt() if b.fused_norm else mean.sqrt() + b.norm_eps
    return x / root * p[f"{name}.scale"].view(heads, -1)


def normed_qk(normed, b, name, q, k):
    """Return the normalised queries and keys [T, E] of each query head."""
    if b.qk_norm_kind == "joined":  # each key head counts once
        group = b.num_heads // (b.num_kv_heads or b.num_heads)
        q = normed(torch.cat(q, -1), f"{name}.query_norm").split(b.head_size, -1)
        k = normed(torch.cat(k[::group], -1), f"{name}.key_norm").split(b.head_size, -1)
        return q, [each for each in k for _ in range(group)]
    names, heads = ("query_norm", "key_norm"), 1
    if b.qk_norm_kind == "by_head":
        names, heads = ("qk_layernorm", "qk_layernorm"), b.num_heads
    return (
        normed(torch.stack(each, 1), f"{name}.{which}", heads).unbind(1)
        for which, each in zip(names, (q, k), strict=True)
    )


def reference(model, scaling, ids):
    """Compute the logits of one sequence from the model's parameters, in plain torch."""
    p, b = dict(model.named_parameters()), model.shape.block
    size, key_heads = b.head_size, b.num_kv_heads or b.num_heads
    group = b.num_heads // key_heads
    ndims = b.rotary_ndims
    turns, gain = angles(ndims, b.rotary_base, scaling)

    def normed(x, name, heads=1):
        return rescaled(p, b, x, name, heads)

    def linear(x, name):
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def turned(x):  # [T, E]
        rows = []
        for t, row in enumerate(x):
            first, second = row[: ndims // 2], row[ndims // 2 : ndims]
            phi = torch.tensor([t * turn for turn in turns], dtype=torch.float64)
            pair = first * phi.cos() - second * phi.sin(), second * phi.cos() + first * phi.sin()
            rows.append(torch.cat((gain * torch.cat(pair), row[ndims:])))
        return torch.stack(rows)

    def attention(x, name):
        # groups side by side, each with its query heads, a key head and a value head
        rows = linear(x, f"{name}.query_key_value").split(size, dim=-1)
        q, k, v = [], [], []
        for h in range(b.num_heads):
            start = h // group * (group + 2)
            q.append(rows[start + h % group])
            k.append(rows[start + group])
            v.append(rows[start + group + 1])
        if b.qk_norm:
            q, k = normed_qk(normed, b, name, q, k)
        out = []
        for q_TE, k_TE, v_TE in zip(q, k, v, strict=True):
            scores = turned(q_TE) @ turned(k_TE).T / math.sqrt(size)
            hidden = torch.ones_like(scores).triu(1).bool()
            out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_TE)
        gate = 1 + (-linear(x, f"{name}.output_gate")).exp() if b.output_gate else 1
        return linear(torch.cat(out, -1) / gate, f"{name}.dense")

    def mlp(x, name):
        value, gate = linear(x, f"{name}.dense_h_to_4h").chunk(2, -1)
        return linear(value * gate * gate.sigmoid(), f"{name}.dense_4h_to_h")

    x = p["embedding.word_embeddings.weight"][ids]
    for name in ("layers.0", "layers.1"):
        first, second = f"{name}.input_layernorm", f"{name}.post_attention_layernorm"
        attended = attention(x if b.output_norms else normed(x, first), f"{name}.attention")
        if b.output_norms:
            x = x + normed(attended, second)
            x = x + normed(mlp(x, f"{name}.mlp"), f"{name}.post_mlp_layernorm")
        elif b.gpt_j_residual:
            x = x + attended + mlp(normed(x, first if b.gpt_j_tied else second), f"{name}.mlp")
        else:
            x = x + attended
            x = x + mlp(normed(x, second), f"{name}.mlp")
    return normed(x, "final_norm") @ p["embedding.word_embeddings.weight"].T


def assert_equal_with_gradients(model, scaling):
    ids, found = tokens(), []
    for logits in (model(ids), torch.stack([reference(model, scaling, row) for row in ids])):
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for name, ours, truth in zip(["logits", *dict(model.named_parameters())], *found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_plain_torch(case, backend):
    assert_equal_with_gradients(build(backend, **CASES[case]), {})


@pytest.mark.parametrize("case", SCALED)
def test_scaled_angles_are_those_of_plain_torch(case):
    model = build(scaling=SCALED[case], **LLAMA)
    assert_equal_with_gradients(model, SCALED[case])
    assert (model(tokens()) - build(**LLAMA)(tokens())).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "everything"])
def test_documents_and_cached_keys_give_the_logits_of_each_document_alone(case):
    ids = tokens()
    ids[:, 10] = END
    packed = build(scaling=YARN, documents=Documents(END, True), **CASES[case])(ids)
    model = build(scaling=YARN, **CASES[case])
    for begin, end in pairwise((0, 11, LENGTH)):
        piece = ids[:, begin:end]
        torch.testing.assert_close(packed[:, begin:end], model(piece), rtol=0, atol=1e-12)
        kept = model.new_cache(torch.full((len(ids),), end - begin))
        pieces = piece.split([6, *[1] * (end - begin - 6)], 1)
        continued = [model.extend(x, kept, last_only=False) for x in pieces]
        torch.testing.assert_close(torch.cat(continued, 1), model(piece), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rope_type": "dynamic"}, "'dynamic' is none of default, linear, ntk, yarn, llama3"),
        ({"rope_type": "yarn", "factor": 2.0}, "yarn needs original_max_position_embeddings"),
        ({"factor": 2.0}, "factor 2.0: default takes no such factor"),
        ({"rope_type": "ntk", "factor": 0.0}, "factor 0.0: ntk takes no such factor"),
    ],
)
def test_wrong_scalings(options, says):
    with pytest.raises(PositionalError, match=says):
        load("rotary", **options)
