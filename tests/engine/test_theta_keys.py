"""Test that wrong start values and names of theta's parameters are reported with their place."""

import pytest
import torch

from megatron.config import ConfigError, load_config
from megatron.engine.build import describe_attention, plan_of
from megatron.model import GPT
from tests.helpers.jobs import write_config


def plan(folder, **changes):
    config = write_config(folder / "config.yml", "text", train_batch_size=4, **changes)
    return plan_of(load_config([config]), 257, device_type="cpu")


def test_start_values_reach_the_model(tmp_path):
    drawn = GPT(plan(tmp_path)).theta
    given = GPT(plan(tmp_path, theta_init={"bias_p": 1.5})).theta
    assert torch.equal(given[:, 0], torch.full((4,), 1.5))
    assert torch.equal(given[:, 1], drawn[:, 1])  # drawn as without start values
    given = GPT(plan(tmp_path, theta_init={"bias_a": [1, 2, 3, 4.5]})).theta
    assert given[:, 1].tolist() == [1, 2, 3, 4.5]


def test_the_names_of_a_frozen_theta(tmp_path):
    assert plan(tmp_path).theta_frozen == plan(tmp_path, theta_frozen=False).theta_frozen == ()
    assert plan(tmp_path, theta_frozen=True).theta_frozen == ("bias_p", "bias_a")
    assert plan(tmp_path, theta_frozen="bias_a").theta_frozen == ("bias_a",)
    gpt = GPT(plan(tmp_path, theta_frozen=["bias_p"]))
    gpt(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert (gpt.theta.grad[:, 0] == 0).all() and (gpt.theta.grad[:, 1] != 0).all()


def test_the_backends_of_unlike_layers_are_told_apart(tmp_path):
    layers = {"pos_emb": [[["kerple_log", "none", "kerple_log"], 1]], "num_layers": 3}
    first, second = describe_attention(plan(tmp_path, **layers).attends)
    assert first.startswith("attention of layers 0, 2: blocked (auto: kerple_log, ")
    assert second.startswith("attention of layer 1: blocked (auto: none, ")
    layers["pos_emb"] = [[["kerple_log"], 3]]
    [alike] = describe_attention(plan(tmp_path, **layers).attends)
    assert alike.startswith("attention: blocked (auto: kerple_log, ")


FIRE = {"pos_emb": "fire", "pos_emb_options": {"width": 5}}


def test_parameters_that_all_heads_share(tmp_path):
    gpt = GPT(plan(tmp_path, **FIRE, theta_init={"c": 0.5, "w1": 2}, theta_frozen=["w0", "v1"]))
    assert gpt.theta.shape == (4, 5) and gpt.embedding.shared_theta.shape == (1, 12)
    assert gpt.embedding.shared_theta[0, [0, 1, 3]].tolist() == [0.5, 1.0, 2.0]
    _, theta = gpt.embedding(torch.zeros(1, 8, dtype=torch.long))
    assert torch.equal(theta[:, :12], gpt.embedding.shared_theta.expand(4, -1))
    assert torch.equal(theta[:, 12:], gpt.theta)
    (theta * torch.arange(4.0)[:, None]).sum().backward()
    expected = torch.full((1, 12), 6.0)  # the sum over heads
    expected[0, 2] = 0.0
    assert torch.equal(gpt.embedding.shared_theta.grad, expected)
    assert gpt.theta.grad[3].tolist() == [3.0, 0.0, 3.0, 3.0, 3.0]


WRONG = [
    ({"theta_init": {"bias_q": 1.0}}, "theta_init: pos_emb kerple_log has no parameter 'bias_q'; "),
    ({"theta_init": {"wei": 1}}, "has no parameter 'wei'; it has bias_p, bias_a"),
    ({"theta_init": {"bias_a": 1e-3}}, "theta_init.bias_a: 0.001 is outside of its bounds, 0.01"),
    ({"theta_init": {"bias_a": [1, 1]}}, "2 numbers for bias_a, but num_attention_heads is 4"),
    ({"theta_init": {"bias_a": "1"}}, "expected numbers for bias_a, got the text '1'; write e.g."),
    ({"theta_init": {"bias_a": []}}, "expected numbers for bias_a, got []; write e.g."),
    ({"theta_init": {"a": {"b": 1}}}, "in a sum of embeddings, e.g. {kerple_log.bias_p: 1.0}"),
    ({"theta_init": 1.0}, "expected a mapping from parameters to numbers, got 1.0; write e.g."),
    ({"theta_frozen": ["bias"]}, "theta_frozen: pos_emb kerple_log has no parameter 'bias'; did"),
    ({"theta_frozen": 1}, "expected true, false or a list of parameters, got 1; write e.g. true"),
    ({"theta_lr_multiplier": 0}, "theta_lr_multiplier: expected a number above 0, got 0"),
    (
        {"theta_frozen": ["bias_p"], "weight_decay_positional": True},
        "['bias_p'] with weight_decay_positional: it would decay all of theta's parameters; write",
    ),
    (
        {"pos_emb": "alibi", "theta_init": {"slope": 1}, "theta_lr_multiplier": 2},
        "theta_init: pos_emb alibi has no learned parameters; drop this key",
    ),
    ({"pos_emb": "rotary", "theta_frozen": True}, "theta_frozen: pos_emb rotary has no learned"),
    ({"pos_emb": "rpe", "eval_distance_scale": 2}, "eval_distance_scale: rpe's buckets hold whole"),
    (FIRE | {"theta_init": {"c": [1, 1, 2, 1]}}, "theta_init.c: all heads share this parameter"),
    ({"pos_emb": "none", "eval_distance_scale": 2}, "eval_distance_scale: none depends on no"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_wrong_value_is_reported_with_its_place(tmp_path, changes, text):
    with pytest.raises(ConfigError) as raised:
        plan(tmp_path, **changes)
    line = next(line for line in str(raised.value).splitlines() if text in line)
    assert line.startswith(f"{tmp_path / 'config.yml'}:")
