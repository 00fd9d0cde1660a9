"""Test `attn_implementation="kerple"`: this project's attention inside transformers."""

from __future__ import annotations

import pytest
import torch

import megatron.hub.kerple_attention  # noqa: F401
from tests.helpers.hub import EMBEDDINGS, close, hub_model, model_of, tokens


def padded():
    """Return ids and a mask with 7 tokens of padding in row 1. The id 3 may end documents."""
    mask, ids = torch.ones(2, 40, dtype=torch.int64), tokens(2, 40)
    mask[1, :7] = 0
    ids[0, 11] = ids[1, 20] = 3
    return ids, mask


# The bias counts from the document, and the temperature from the text.
CASES = EMBEDDINGS | {"fire + log_n": {"document_end": 3}}


@pytest.mark.parametrize("pos_emb", CASES)
def test_an_export_computes_the_same(pos_emb):
    model = model_of(pos_emb, **CASES[pos_emb])
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
def test_a_model_that_is_no_export_is_refused():
    model = hub_model("gpt_neox")
    model.set_attn_implementation("kerple")
    with pytest.raises(ValueError, match="kerple serves exports of this project alone; use sdpa"):
        model(tokens(1, 9))
