"""Test which parameters have weight decay, the engine's configuration, and torch's optimizers."""

from types import SimpleNamespace

import pytest
import torch

from megatron.attention import choose
from megatron.config import load_config
from megatron.config.sections.training import OptimizerConfig
from megatron.engine.errors import StartError
from megatron.engine.training.deepspeed_engine import engine_config
from megatron.engine.training.optimizer import (
    all_finite,
    build_optimizer,
    gradient_norm,
    keep_hyperparameters,
    mark_sharded_gradients,
    parameter_groups,
)
from megatron.engine.training.schedule import AnnealingLR, Schedule
from megatron.engine.training.without_compiler import without_compiler
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sharding import Sharding, mark_sharding
from megatron.positional import load
from tests.helpers.paths import ROOT


def adam(weight_decay, **values):
    return OptimizerConfig(lr=0.1, weight_decay=weight_decay, **values)


def model(**shape):
    pos = load("kerple_log")
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=16, **{"num_heads": 2, **shape})
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
    for unknown in ("lion", "sophia"):
        with pytest.raises(ValueError, match=unknown):
            build_optimizer(unknown, [group], adam(0.01))


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


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize(("decays", "weight_decay"), [(True, 0.3), (False, 0.0)])
def test_theta_with_a_rate_of_its_own_is_the_third_group(kind, decays, weight_decay):
    gpt = model()
    keys = {"theta_lr_multiplier": 5.0, "weight_decay_positional": decays, "type": kind}
    groups = parameter_groups(gpt, adam(0.3, **keys))
    assert [g["name"] for g in groups[:3]] == ["decayed", "not decayed", "theta"]
    assert names(gpt, groups[2]) == {"embedding.theta"}
    assert (groups[2]["lr_multiplier"], groups[2]["weight_decay"]) == (5.0, weight_decay)


def test_a_stage_without_theta_has_another_parameter_in_its_group():
    stage = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2, bias=False))
    section = adam(0.3, theta_lr_multiplier=5.0)
    decayed, exempt, theta = parameter_groups(stage, section)
    assert names(stage, decayed) == {"0.weight"} and names(stage, exempt) == {"0.bias"}
    assert names(stage, theta) == {"1.weight"}
    assert (theta["lr_multiplier"], theta["weight_decay"]) == (1.0, 0.0)
    # With one exempt parameter, it is a decayed one: an empty group would let other stages wait.
    stage = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    decayed, exempt, theta = parameter_groups(stage, section)
    assert names(stage, decayed) == {"0.weight"} and names(stage, exempt) == {"0.bias"}
    assert names(stage, theta) == {"1.weight"}
    assert (theta["lr_multiplier"], theta["weight_decay"]) == (1.0, 0.3)


def test_a_stage_with_too_few_parameters_is_refused():
    """Of a block without biases, Muon trains all but the norm."""
    stage = torch.nn.Module()
    stage.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.RMSNorm(2)])
    with pytest.raises(StartError, match="pipe_parallel_size: a stage has too few norms and bias"):
        parameter_groups(stage, adam(0.3, type="muon"))


class Two(TensorGroup):
    """The first of two tensor-parallel ranks; the other has a sharded gradient of norm 12."""

    def gather(self, tensor):
        return [tensor, torch.tensor(144.0)]


def layer_with_gradients():
    """Return a layer whose sharded weight has a gradient of norm 5, and whose bias has (2, 4)."""
    layer = torch.nn.Linear(2, 2)
    layer.frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)
    layer.weight.grad = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    layer.bias.grad = torch.tensor([2.0, 4.0])
    mark_sharding(layer.weight, Sharding(0), TensorGroup(size=2))
    return layer


def test_the_norm_counts_sharded_gradients_of_all_ranks_and_others_once():
    layer = layer_with_gradients()
    assert gradient_norm(layer, Two(size=2)).item() == pytest.approx((20 + 25 + 144) ** 0.5)
    assert gradient_norm(layer, ALONE).item() == pytest.approx((20 + 25) ** 0.5)


def test_only_gradients_of_sharded_parameters_are_marked():
    layer = layer_with_gradients()
    mark_sharding(layer.frozen, Sharding(0), TensorGroup(size=2))
    mark_sharded_gradients(layer)
    assert layer.weight.grad.model_parallel is True
    assert not hasattr(layer.bias.grad, "model_parallel") and layer.frozen.grad is None


def test_a_loaded_checkpoint_changes_no_hyperparameter():
    def built(weight_decay, **adams):
        section = adam(weight_decay, theta_lr_multiplier=2.0, **adams)
        return build_optimizer("adam", parameter_groups(model(), section), section)

    def values(optimizer):
        keys = ("weight_decay", "betas", "eps", "lr_multiplier", "lr")
        return [[group.get(key) for key in keys] for group in optimizer.param_groups]

    mine = built(0.1, betas=(0.8, 0.9), eps=1e-3)
    other = built(0.3, betas=(0.5, 0.6), eps=1e-2)
    schedule = AnnealingLR(mine, Schedule(start_lr=0.5, end_iter=10, decay_style="constant"))
    before = values(mine)
    assert [each[-1] for each in before] == [0.5, 0.5, 1.0]
    with keep_hyperparameters(schedule, SimpleNamespace()):
        mine.load_state_dict(other.state_dict())
        assert values(mine) == values(other) != before
    assert values(mine) == before


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_weights_and_state_are_those_of_torchs_class(optimizer, options):
    found = []
    for kind in (optimizer, without_compiler(optimizer)):
        weight, calls = torch.nn.Parameter(torch.arange(6.0).view(2, 3)), []
        made = kind([weight], **options)
        made.register_step_post_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        for step in range(3):
            (weight * (step + 1)).pow(2).sum().backward()
            made.step()
            made.zero_grad()
        again = kind([torch.nn.Parameter(torch.zeros(2, 3))], **options)
        again.load_state_dict(made.state_dict())
        again.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        state = again.state_dict()["state"][0].values()
        found.append([weight.detach(), weight.grad, calls, len(again.param_groups), *state])
        assert isinstance(made, optimizer) and type(made).__name__ == optimizer.__name__
    for theirs, ours in zip(*found, strict=True):
        same = torch.equal(theirs, ours) if torch.is_tensor(theirs) else theirs == ours
        assert same, (theirs, ours)
    assert found[0][2] == [True] * 3


def test_torchs_own_class_stays_as_it_is():
    before = dict(vars(torch.optim.SGD))
    without_compiler(torch.optim.SGD)([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
    assert dict(vars(torch.optim.SGD)) == before
