"""Test `attn_implementation="kerple"`: this project's attention inside transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

import megatron.hub.kerple_attention  # noqa: F401
from tests.helpers.hub import EMBEDDINGS, close, hub_model, model_of, tokens


def padded():
    """Return token ids and an attention mask with 7 tokens of padding in row 1."""
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :7] = 0
    return tokens(2, 40), mask


@pytest.mark.parametrize("pos_emb", EMBEDDINGS)
def test_an_export_computes_the_same(pos_emb):
    model = model_of(pos_emb, **EMBEDDINGS[pos_emb])
    ids, mask = padded()
    found = {}
    for name in ("eager", "kerple"):
        model.set_attn_implementation(name)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        gradients = torch.autograd.grad(logits.square().mean(), [*model.parameters()])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        found[name] = logits, *gradients, made
    close(found["kerple"], found["eager"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gpt_neox", {}), ("mistral", {"num_key_value_heads": 2, "sliding_window": 5})],
)
def test_a_model_of_transformers_computes_the_same(kind, changes):
    model = hub_model(kind, **changes)
    ids, mask = padded()
    wanted = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("kerple")
    close(model(ids, attention_mask=mask).logits[mask.bool()], wanted, 1e-5)
    unpadded = model(ids).logits
    model.set_attn_implementation("eager")
    close(unpadded, model(ids).logits, 1e-5)


def test_what_is_no_causal_attention_is_refused():
    attend = megatron.hub.kerple_attention.kerple_attention
    q, mask = torch.randn(1, 2, 5, 8), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="serves causal attention to neighbours alone"):
        attend(None, q, q, q, mask)
    holes = mask.tril()
    holes[..., 4, 2] = False
    with pytest.raises(ValueError, match="serves causal attention to neighbours alone"):
        attend(None, q, q, q, holes)
    with pytest.raises(ValueError, match="kerple does not serve softcap"):
        attend(None, q, q, q, None, softcap=30.0)
    for wrong in (torch.zeros(1, 1, 5, 5), mask.tril().expand(1, 2, 5, 5)):
        with pytest.raises(ValueError, match=r"serves a bool mask \[B, 1, T, S\], not torch"):
            attend(None, q, q, q, wrong)


@torch.no_grad()
def test_a_model_that_also_reads_later_tokens_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=300, intermediate_size=44, **sizes)
    model = BertModel._from_config(config, attn_implementation="kerple")
    ids, mask = padded()
    with pytest.raises(ValueError, match="kerple serves causal attention alone; use sdpa"):
        model(ids)
    with pytest.raises(ValueError, match="serves causal attention to neighbours alone"):
        model(ids, attention_mask=mask)
