"""Test the exported class as a model of transformers: each argument of `forward`, and theta."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments
from transformers.integrations import flex_attention

from megatron.hub.export import _CLASSES
from megatron.hub.modeling_kerple import (
    KerpleConfig,
    KerpleForCausalLM,
    KerpleForSequenceClassification,
    KerpleModel,
)
from megatron.positional import bounds

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "rotary_ndims": 4, "tie_word_embeddings": False}
EMBEDDINGS = {
    "kerple_log": {},
    "rotary": {},
    "rotary + kerple_log + forget_gate": {"windows": [None, 9]},
    "fire": {},
    "kerple_power_mul": {},
    "log_n + sink + kerple_power": {"qk_norm": True},
    "learned": {},
    "kerple_log + rpe": {"document_end": 3, "restart_positions": True},
}
"""The embedding, and other keys of the config."""


def model_of(pos_emb="kerple_log", kind=KerpleForCausalLM, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    config = KerpleConfig(pos_emb=pos_emb, max_position_embeddings=400, **(SHAPE | changes))
    model = kind(config).to(dtype).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "theta" not in name:
                each.add_(torch.randn_like(each), alpha=0.2)
    return model


def tokens(*shape, seed=2):
    return torch.randint(4, 64, shape, generator=torch.Generator().manual_seed(seed))


def close(found, wanted, atol=1e-10):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("pos_emb", EMBEDDINGS)
def test_sdpa_is_eager(pos_emb):
    """Logits, gradients, caches: with padding, over several blocks, with theta's bias."""
    model = model_of(pos_emb, **EMBEDDINGS[pos_emb])
    ids = tokens(2, 150)
    ids[0, 40] = 3
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    found = {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        gradients = torch.autograd.grad(logits.square().mean(), [*model.parameters()])
        with torch.no_grad():
            whole = model(ids, attention_mask=mask).logits[mask.bool()]
            part = model(ids[:, :140], attention_mask=mask[:, :140])
            rest = model(ids[:, 140:], attention_mask=mask, past_key_values=part.past_key_values)
        cached = torch.cat((part.logits, rest.logits), dim=1)[mask.bool()]
        close(whole, logits)
        close(cached, logits)
        found[name] = logits, *gradients
    close(found["sdpa"], found["eager"])
    theta = model.model.position_bias
    if theta is not None and any(p.trained for p in theta.pos.parameters):
        assert (
            torch.autograd.grad(model(ids).logits.square().mean(), theta.theta)[0].abs().sum() > 0
        )


@torch.no_grad()
@pytest.mark.parametrize("pos_emb", ["kerple_log", "kerple_power_mul"])
def test_flex_is_eager(pos_emb, monkeypatch):
    def uncompiled(*inputs, training, **options):  # compiling takes seconds
        return flex_attention.flex_attention(*inputs, **options)

    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    model = model_of(pos_emb, dtype=torch.float32, windows=[None, 9])
    ids, mask = tokens(2, 50), torch.ones(2, 50, dtype=torch.int64)
    mask[1, :9] = 0
    model.set_attn_implementation("eager")
    wanted = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("flex_attention")
    close(model(ids, attention_mask=mask).logits[mask.bool()], wanted, 1e-4)
    model = model_of("fire", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="flex_attention cannot compute fire; use sdpa"):
        model(ids)


@torch.no_grad()
def test_theta_is_never_forgotten(tmp_path):
    """Not by a reload, which chooses sdpa by itself, and not by a function that ignores it."""
    model = model_of(dtype=torch.float32)
    ids = tokens(1, 40)
    wanted = model(ids).logits
    model.save_pretrained(tmp_path)
    again = KerpleForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    close(again(ids).logits, wanted, 1e-5)
    again.model.position_bias.theta += 1
    assert (again(ids).logits - wanted).abs().max() > 0.01
    again.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match=r"'paged\|sdpa' would leave out the positional embedding"):
        again(ids)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_scores_are_fp32_under_autocast(name):
    model = model_of(dtype=torch.float32, attn_implementation=name)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :30] = 0
    wanted = model(ids, attention_mask=mask).logits[mask.bool()]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, attention_mask=mask).logits
        logits.float().square().mean().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())
    close(logits[mask.bool()].float(), wanted, 0.15)


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
    of_model = inspect.signature(KerpleForCausalLM.forward).parameters
    assert of_model.keys() - {"self"} == SERVED.keys()
    for kind in (KerpleModel, KerpleForSequenceClassification):
        assert inspect.signature(kind.forward).parameters.keys() <= of_model.keys()
    model = model_of()
    for unknown in ("token_type_ids", "head_mask", "cache_position", "shift_labels"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            model(tokens(1, 3), **{unknown: None})
    for serves in dict.fromkeys(SERVED.values()):
        with torch.no_grad():
            serves(model_of())


def test_classification_reads_the_last_token_that_is_not_padding():
    model = model_of(kind=KerpleForSequenceClassification, num_labels=3)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    short = model(ids[1:, :5]).logits
    mask[1, 5:] = 0
    close(model(ids, attention_mask=mask).logits[1:], short)
    padded = torch.cat((ids[:1], F.pad(ids[1:, :5], (4, 0))))
    close(model(padded, attention_mask=mask.flip(1)).logits[1:], short)
    out = model(ids, labels=torch.tensor([0, 2]))
    out.loss.backward()
    close(out.loss, F.cross_entropy(out.logits, torch.tensor([0, 2])))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model = model_of().train()
    ids = tokens(1, 20)
    wanted = torch.autograd.grad(model(ids, labels=ids).loss, [*model.parameters()])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(ids, labels=ids).loss.backward()
    close([x.grad for x in model.parameters()], list(wanted))


def trained(model, folder, **options):
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 12)]
    settings = {"max_steps": 50, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 2, "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(folder), **(settings | options))
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "adafactor"])
def test_theta_trains_within_its_bounds(tmp_path, optimizer):
    """In fp32, without weight decay, and saved so. The other weights would diverge."""
    model_of("kerple_power + alibi", dtype=torch.bfloat16).save_pretrained(tmp_path / "a")
    model = KerpleForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    theta, pos = model.model.position_bias.theta, model.model.position_bias.pos
    start = theta.detach().clone()
    model.requires_grad_(False)
    theta.requires_grad_()
    assert theta.dtype == torch.float32 and model.dtype == torch.bfloat16
    trainer = trained(model, tmp_path / "b", learning_rate=1e2, weight_decay=0.5, optim=optimizer)
    decayed = trainer.get_decay_parameter_names(model)
    assert not [name for name in decayed if "theta" in name or "norm" in name or "bias" in name]
    low, high = bounds(pos.parameters)
    changed = [p.trained for p in pos.parameters]
    assert ((theta >= low) & (theta <= high)).all() and not torch.equal(theta, start)
    assert torch.equal(theta[:, ~torch.tensor(changed)], start[:, ~torch.tensor(changed)])
    model.save_pretrained(tmp_path / "c")
    again = KerpleForCausalLM.from_pretrained(tmp_path / "c")
    assert torch.equal(again.model.position_bias.theta, theta)


def test_a_shared_column_stays_shared(tmp_path):
    model = model_of("fire", dtype=torch.float32)
    column = [p.shared for p in model.model.position_bias.pos.parameters].index(True)
    trained(model, tmp_path, learning_rate=1e-2, max_steps=3)
    values = model.model.position_bias.theta[:, column]
    assert len(values.unique()) == 1


def test_another_optimizer_is_followed_by_the_next_pass():
    model = model_of(dtype=torch.float32).train()
    theta = model.model.position_bias.theta
    first = model(tokens(1, 9)).logits.sum()
    with torch.no_grad():
        theta.copy_(torch.full_like(theta, -1.0))
    model(tokens(1, 9))
    assert torch.equal(theta, torch.full_like(theta, 0.01))
    first.backward()  # what was computed before is still differentiated
    assert theta.grad.abs().sum() > 0


def test_each_class_of_the_export_exists():
    kinds = (KerpleConfig, KerpleModel, KerpleForCausalLM, KerpleForSequenceClassification)
    assert {*_CLASSES.values()} == {kind.__name__ for kind in kinds}
