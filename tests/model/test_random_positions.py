"""Test positions that are drawn at random in training (arXiv 2305.16843)."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.attention import choose
from megatron.config import ConfigError, load_config
from megatron.engine.build import plan_of
from megatron.model import GPT, BlockShape, Documents, GPTShape, LayerAttention, Plan
from megatron.model.cache import LayerCache
from megatron.positional import load
from tests.helpers.jobs import write_config

VOCAB, T, L = 40, 24, 90
DRAWN = Documents(None, drawn_from=L)


def tokens(batch=2, seed=0):
    return torch.randint(VOCAB, (batch, T), generator=torch.Generator().manual_seed(seed))


def drawn(ids):
    return torch.arange(T) - DRAWN.starts(ids, training=True)


def build(name, documents=DRAWN):
    pos = load(name)
    use = {"device_type": "cpu", "dtype": torch.float64, "decays": pos.has("gate")}
    attend = choose("auto", pos, **use)
    shape = GPTShape(2, VOCAB, BlockShape(16, 2), L)
    layers = (LayerAttention(pos, attend, slice(None)),) * 2
    model = GPT(Plan(shape, pos, attend, 1, layers=layers, documents=documents)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(
                torch.randn(each.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3
            )
    return model


def test_the_positions_are_a_random_subset_in_order():
    ids = tokens(400)
    at = drawn(ids)
    assert at.min() >= 0 and at.max() < L and (at.diff(dim=1) > 0).all()
    assert len(at.unique(dim=0)) == 400
    counts = at.flatten().bincount(minlength=L).double()
    expected = 400 * T / L  # binomial: each position in T of L sequences
    assert (counts - expected).abs().max() < 4.5 * (expected * (1 - T / L)) ** 0.5
    # neighbours are as far apart as in a random subset
    assert abs(at.diff(dim=1).double().mean() - (L + 1) / (T + 1)) < 0.1


def test_they_belong_to_the_sequence():
    ids = tokens(5)
    assert torch.equal(drawn(ids[[3, 1]]), drawn(ids)[[3, 1]])
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCAB
    assert (drawn(changed) != drawn(ids)).any(1).all()
    assert torch.equal(drawn(ids[:, :]), drawn(ids))
    assert not DRAWN.starts(ids).any()  # in evaluation, positions are 0, 1, 2 ...
    assert torch.equal(Documents(None, drawn_from=T).starts(ids, training=True), 0 * ids)


class At(LayerCache):
    """A cache whose tokens are at given positions."""

    def __init__(self, positions_BT):
        super().__init__(torch.zeros(len(positions_BT), dtype=torch.int64))
        self.given = positions_BT

    def positions(self, count, *, in_document=False):
        return self.given[:, :count]


@pytest.mark.parametrize("name", ["rotary + log_n", "learned", "sinusoidal + sink", "forget_gate"])
def test_training_has_the_values_of_these_positions_and_evaluation_the_usual_ones(name):
    model, ids = build(name), tokens()
    with torch.no_grad():
        found = model.train()(ids)
        truth = model.extend(ids, [At(drawn(ids)) for _ in model.layers], last_only=False)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
        usual = build(name, None)(ids)
        torch.testing.assert_close(model.eval()(ids), usual, rtol=0, atol=1e-12)
    assert ((found - usual).abs().max() > 1e-3) == (name != "forget_gate")


def test_recomputed_blocks_have_the_same_positions():
    model, ids, found = build("rotary").train(), tokens(), []
    for recompute in (False, True):
        vars(model.shape)["checkpoint_activations"] = recompute
        loss = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"pos_emb": "rotary + kerple_log"},
            "rotary . kerple_log computes distances from the orde",
        ),
        ({"pos_emb": "fire"}, "fire computes distances from the order of the tokens"),
        ({"pos_emb": "rotary", "seq_length": 200}, "100 positions are too few for seq_length 200"),
        ({"pos_emb": "rotary", "reset_attention_mask": True}, "has positions of its own"),
        ({"pos_emb": "learned"}, "100 is above max_position_embeddings 16"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        keys = {"train_batch_size": 4, "random_positions": 100} | changes
        file = write_config(tmp_path / "c.yml", "text", **keys)
        plan_of(load_config([file]), 40, device_type="cpu", eod=0)
