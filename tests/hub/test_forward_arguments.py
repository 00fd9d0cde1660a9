"""Test that `forward` of the exported class serves each of its arguments, and refuses others."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache

from megatron.hub.modeling_kerple import (
    KerpleForCausalLM,
    KerpleModel,
)
from tests.helpers.hub import close, model_of, tokens

PACKED = [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
LENGTHS = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
NUMBERS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])


def assert_packed(model, **given):
    ids = tokens(1, 12)
    alone = [model(x).logits for x in ids.split([5, 3, 4], dim=1)]
    close(model(ids, **given).logits, torch.cat(alone, dim=1))


def serves_labels(model):
    ids = tokens(2, 9)
    out = model(ids, labels=ids)
    wanted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    close(out.loss, wanted, 1e-5)


def serves_num_items(model):
    ids = tokens(2, 9)
    out, mean = model(ids, labels=ids, num_items_in_batch=4), model(ids, labels=ids).loss
    close(out.loss, mean * 16 / 4, 1e-5)


def serves_logits_to_keep(model):
    ids = tokens(2, 9)
    wanted = model(ids).logits
    close(model(ids, logits_to_keep=2).logits, wanted[:, -2:])
    places = torch.tensor([1, 4])
    close(model(ids, logits_to_keep=places).logits, wanted[:, places])


def serves_attentions(model):
    ids = tokens(2, 9)
    with pytest.raises(ValueError, match="'sdpa' computes no attention probabilities"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    found = model(ids, output_attentions=True).attentions
    assert len(found) == 2 and found[0].shape == (2, 4, 9, 9)
    for each in found:
        close(each.sum(-1), torch.ones(2, 4, 9).double())
        assert (each.triu(1) == 0).all()


def serves_hidden_states(model):
    ids = tokens(2, 9)
    out = model(ids, output_hidden_states=True)
    backbone = model.model(ids)
    first = model.get_input_embeddings()(ids)
    assert len(out.hidden_states) == 3 and torch.equal(out.hidden_states[0], first)
    close(out.hidden_states[-1], backbone.last_hidden_state)
    close(model.output(backbone.last_hidden_state), out.logits)
    assert isinstance(model(ids, return_dict=False), tuple)


def serves_mask(model):
    ids, short = tokens(2, 9), tokens(1, 4)
    mask = torch.ones_like(ids)
    for place, padded in ((slice(5), (5, 0)), (slice(4, None), (0, 5))):
        mask = torch.ones_like(ids)
        mask[1, place] = 0
        both = torch.cat((ids[:1], F.pad(short, padded)))
        found = model(both, attention_mask=mask).logits[1, mask[1].bool()]
        close(found, model(short).logits[0])
    mask[1] = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="attention_mask between tokens is 0"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask must be 0 for padding and 1"):
        model(ids, attention_mask=torch.ones_like(ids) * 2)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 9\]"):
        model(ids, attention_mask=torch.ones(2, 1, 9, 9))


def serves_positions(model):
    assert_packed(model, position_ids=torch.tensor([PACKED]))
    with pytest.raises(ValueError, match="position_ids must rise by 1"):
        model(tokens(1, 3), position_ids=torch.tensor([[0, 2, 3]]))
    rotary = model_of("learned")
    later = rotary(tokens(1, 5), position_ids=torch.arange(7, 12)[None]).logits
    assert (later - rotary(tokens(1, 5)).logits).abs().max() > 0.1


def serves_cache(model):
    ids = tokens(1, 9)
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=20)):
        first = model(ids[:, :6], past_key_values=cache).logits
        rest = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, 9)]
        close(torch.cat((first, *rest), dim=1), model(ids).logits)


def serves_use_cache(model):
    assert model(tokens(1, 3), use_cache=False).past_key_values is None
    assert model(tokens(1, 3), use_cache=True).past_key_values.get_seq_length() == 3


def serves_embeds(model):
    ids = tokens(1, 5)
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


def serves_lengths(model):
    """They are the largest of the document lengths, which no result depends on."""
    given = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS}
    assert_packed(model, **given, max_length_q=5, max_length_k=5)
    assert_packed(model, **given, max_length_q=1, max_length_k=1)


def serves_documents(model):
    assert_packed(model, cu_seq_lens_q=LENGTHS, cu_seq_lens_k=LENGTHS)
    assert_packed(model, position_ids=torch.tensor([PACKED]), cu_seq_lens_q=LENGTHS)
    assert_packed(model, seq_idx=NUMBERS)
    assert_packed(model, cu_seq_lens_k=LENGTHS, seq_idx=NUMBERS)
    with pytest.raises(ValueError, match="cu_seq_lens_q/k mean different documents"):
        model(tokens(1, 12), seq_idx=NUMBERS, cu_seq_lens_q=torch.tensor([0, 12]))


SERVED = {
    "input_ids": serves_embeds, "inputs_embeds": serves_embeds, "attention_mask": serves_mask,
    "position_ids": serves_positions, "past_key_values": serves_cache, "labels": serves_labels,
    "use_cache": serves_use_cache, "output_attentions": serves_attentions,
    "output_hidden_states": serves_hidden_states, "logits_to_keep": serves_logits_to_keep,
    "num_items_in_batch": serves_num_items,
    "cu_seq_lens_q": serves_documents, "cu_seq_lens_k": serves_documents,
    "max_length_q": serves_lengths, "max_length_k": serves_lengths, "seq_idx": serves_documents,
}  # fmt: skip
"""The test of each argument of `forward`."""


def test_forward_serves_each_of_its_arguments():
    of_head, of_model = (
        inspect.signature(kind.forward).parameters.keys()
        for kind in (KerpleForCausalLM, KerpleModel)
    )
    assert (of_head | of_model) - {"self", "others"} == SERVED.keys()
    model = model_of()
    for unknown in ("token_type_ids", "head_mask", "cache_position", "shift_labels"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            model(tokens(1, 3), **{unknown: None})
    for serves in dict.fromkeys(SERVED.values()):
        with torch.no_grad():
            serves(model_of())


@pytest.mark.parametrize(
    "changes", [{"pos_emb": "forget_gate"}, {"head_size": 6}, {"document_end": 5}], ids=str
)
def test_a_static_cache_that_is_filled_in_parts(changes):
    """transformers would allocate it for keys of hidden_size / heads numbers."""
    model = model_of(**changes)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(tokens(2, 9), **options)
    found = model.generate(
        tokens(2, 9), **options, cache_implementation="static", prefill_chunk_size=4
    )
    assert torch.equal(found, wanted)
