"""Test which parameters have weight decay, and the configuration that the engine gets."""

from types import SimpleNamespace

import pytest
import torch

from megatron.attention import choose
from megatron.config import load_config
from megatron.config.sections.training import OptimizerConfig
from megatron.engine.training.deepspeed_engine import engine_config
from megatron.engine.training.optimizer import all_finite, build_optimizer, parameter_groups
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.positional import load
from tests.helpers.paths import ROOT


def adam(weight_decay, **values):
    return OptimizerConfig(lr=0.1, weight_decay=weight_decay, **values)


def model():
    pos = load("kerple_log")
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=16, num_heads=2)
    return GPT(
        Plan(GPTShape(num_layers=1, vocab_size=8, block=block, max_positions=4), pos, attend, 1)
    )


def names(gpt, group):
    wanted = {id(p) for p in group["params"]}
    return {name for name, p in gpt.named_parameters() if id(p) in wanted}


def test_biases_norms_and_theta_are_not_decayed():
    gpt = model()
    decayed, exempt = parameter_groups(gpt, adam(0.1))
    assert decayed["weight_decay"] == 0.1 and exempt["weight_decay"] == 0.0
    assert "embedding.theta" in names(gpt, exempt)
    assert all(n.endswith((".weight",)) for n in names(gpt, decayed))
    assert not any("norm" in n for n in names(gpt, decayed))
    assert "embedding.word_embeddings.weight" in names(gpt, decayed)
    assert names(gpt, decayed) | names(gpt, exempt) == {n for n, _ in gpt.named_parameters()}


def test_theta_decays_when_asked_and_nothing_at_zero():
    gpt = model()
    assert "embedding.theta" in names(
        gpt, parameter_groups(gpt, adam(0.1, weight_decay_positional=True))[0]
    )
    # the same two groups whatever the decay, or a resumed optimizer would not fit
    assert [g["weight_decay"] for g in parameter_groups(gpt, adam(0.0))] == [0.0, 0.0]
    assert names(gpt, parameter_groups(gpt, adam(0.0))[0]) == names(
        gpt, parameter_groups(gpt, adam(0.1))[0]
    )


def test_adam_is_decoupled():
    weight = torch.nn.Parameter(torch.full((2,), 2.0))
    group = {"params": [weight], "weight_decay": 0.5}
    optimizer = build_optimizer("adam", [group], adam(0.01))
    weight.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 2.0 * (1 - 0.1 * 0.5)))
    with pytest.raises(ValueError, match="lion"):
        build_optimizer("lion", [group], adam(0.01))


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_clipping_is_always_written(clipping):
    keys = [
        "train_micro_batch_size_per_gpu=3", "gradient_accumulation_steps=2", "precision=bf16",
        f"gradient_clipping={clipping}", "train_batch_size=null",
        "zero_optimization={stage: 2, overlap_comm: true}",
        "optimizer={type: Adam, params: {lr: 0.1}}",
    ]  # fmt: skip
    config = engine_config(load_config([ROOT / "configs" / "quickstart.yml"], keys), replicas=4)
    assert config["gradient_clipping"] == clipping
    assert config["train_batch_size"] == 24
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert config["bf16"]["enabled"] and not config["fp16"]["enabled"]


@pytest.mark.parametrize(("rank", "index", "finite"), [(1, 2, True), (1, 1, False), (2, 0, True)])
def test_only_elements_of_the_weight_are_checked(rank, index, finite):
    """Three slices of 3 elements hold a weight of 5: the last 4 elements are padding."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_numel, weight.ds_tensor = 5, torch.zeros(3)
    weight.ds_tensor[index] = torch.nan
    groups = SimpleNamespace(replica_rank=rank, device="cpu", sum_over_job=lambda count: count)
    assert all_finite(torch.nn.ParameterList([weight]), groups) == finite
