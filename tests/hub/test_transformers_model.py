"""Test the exported classes: attention implementations, the classifier, and theta in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations import flex_attention

from megatron.hub.export import AUTO_CLASSES
from megatron.hub.modeling_kerple import (
    KerpleConfig,
    KerpleForCausalLM,
    KerpleForSequenceClassification,
    KerpleModel,
)
from megatron.hub.padded_call import PaddedCall, probabilities
from megatron.positional import bounds, load
from tests.helpers.hub import EMBEDDINGS, close, model_of, tokens, trained


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


def test_probabilities_are_fp32_under_autocast():
    q_BHTE, k_BKSE = torch.randn(2, 1, 2, 9, 8, generator=torch.Generator().manual_seed(1))
    columns = {"columns_T": torch.arange(9), "positions_BT": torch.arange(9)[None]}
    call = PaddedCall(
        q_BHTE, k_BKSE, k_BKSE, load("none"), torch.zeros(2, 0), **columns, scale=1.0,
        first_BT=None, vectors={},
    )  # fmt: skip
    wanted_BHTS = (q_BHTE @ k_BKSE.mT).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    with torch.autocast("cpu", torch.bfloat16):
        close(probabilities(call), wanted_BHTS.softmax(-1), 1e-6)


def test_classification_reads_the_last_token_that_is_not_padding():
    model = model_of(kind=KerpleForSequenceClassification, num_labels=3, pad_token_id=0)
    ids, mask = tokens(2, 9).clamp(min=1), torch.ones(2, 9, dtype=torch.int64)
    short = model(ids[1:, :5]).logits
    mask[1, 5:] = ids[1, 5:] = 0
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
    cache = model.eval()(ids).past_key_values
    with pytest.raises(ValueError, match="gradient checkpointing reads no past_key_values"):
        model.train()(ids, past_key_values=cache)


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


@pytest.mark.parametrize("name", ["alibi", "sandwich", "kerple_power_original", "kerple_log"])
def test_each_parameter_gets_a_gradient(name):
    """DDP with gradient checkpointing waits for the gradient of every parameter."""
    model = model_of(name)
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    assert all(each.grad is not None for each in model.parameters())
    assert "model.position_bias.theta" in model.state_dict()


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


def test_an_optimizer_changes_no_theta_but_its_own():
    """Nor does it touch a model that was built for inference alone."""
    with torch.inference_mode():
        fixed = model_of(dtype=torch.float32).train()
    model, other = (model_of(dtype=torch.float32).train() for _ in range(2))
    thetas = [each.model.position_bias.theta for each in (model, other)]
    for theta in thetas:
        theta.detach().fill_(-1.0)
    torch.optim.SGD([thetas[0]], lr=0.1).step()
    assert (thetas[0] == 0.01).all() and (thetas[1] == -1.0).all()
    assert fixed.state_dict()


def test_each_class_of_the_export_exists():
    kinds = (KerpleConfig, KerpleModel, KerpleForCausalLM, KerpleForSequenceClassification)
    assert {*AUTO_CLASSES.values()} == {kind.__name__ for kind in kinds}
