"""Test the options of embeddings that are combined, and which theta a checkpoint may give them."""

import math

import pytest
import torch

from megatron.config import ConfigError, load_config
from megatron.engine.build import plan_of, positional_of
from megatron.positional import PositionalError
from tests.helpers.jobs import write_config


def config(folder, **changes):
    return load_config([write_config(folder / "c.yml", "text", train_batch_size=4, **changes)])


@pytest.mark.parametrize(
    ("pos_emb", "options", "says"),
    [
        ("rotary + rpe", {"rpe": 3}, "rpe has 3; write {rpe: {...}}"),
        ("rotary + log_n", {"log_n": None}, "log_n has None"),
        ("log_n", {"numerics": 3}, "log_n has {'numerics': 3}"),
        ("rotary + rpe", {"num_buckets": 4}, "num_buckets, which is no term of pos_emb"),
        ([[["kerple_sum"], 2]], {"logs": 2}, "logs, which is no term of pos_emb"),
        ("log_n", {"size": 3}, "log_n has no option size; its options are length"),
    ],
)
def test_wrong_options(tmp_path, pos_emb, options, says):
    with pytest.raises(PositionalError) as error:
        positional_of(config(tmp_path, pos_emb=pos_emb, pos_emb_options=options))
    assert says in str(error.value)


def test_options_reach_their_terms(tmp_path):
    options = {"log_n": {"length": 64}, "rpe": {"num_buckets": 8}}
    pos = positional_of(config(tmp_path, pos_emb="log_n + rpe", pos_emb_options=options))
    start = pos.initial_theta(4)
    assert start.shape == (4, 9)
    torch.testing.assert_close(start[:, 0], torch.full((4,), 1 / math.log(64)))
    layers = positional_of(
        config(tmp_path, pos_emb=[[["log_n"], 2]], pos_emb_options={"log_n": {"length": 64}})
    )
    assert torch.equal(layers.initial_theta(4), start[:, :1])


def test_a_theta_per_layer_needs_a_theta(tmp_path):
    wrong = config(tmp_path, pos_emb="alibi", theta_per_layer=True)
    with pytest.raises(ConfigError, match="theta_per_layer: pos_emb .* has no learned parameters"):
        plan_of(wrong, 257, device_type="cpu")
