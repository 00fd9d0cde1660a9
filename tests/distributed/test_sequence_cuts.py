"""Test sequence and context parallelism: the values are those of one process."""

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.sharding import sharding_of, unsharded
from tests.distributed.tensor_parallel_models import VARIANTS, build
from tests.distributed.test_pipeline import DROPOUT, train
from tests.distributed.test_tensor_parallel import in_pieces
from tests.helpers.jobs import cell, digest, measured, rewind, rows, write_shards
from tests.helpers.launch import run_ranks

LAYOUTS = {  # ranks, how they are divided
    "sequence parallel": (2, {"model_size": 2, "sequence_parallel": True}),
    "Ulysses": (2, {"context_size": 2}),
    "both": (4, {"model_size": 2, "context_size": 2, "sequence_parallel": True}),
}
LENGTHS = (12, 13)  # the second is padded and cut again


def results(model, length, groups=None):
    """Return (token losses, logits, averaged gradients of unsharded parameters)."""
    tokens = torch.randint(0, 32, (3, length + 1), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    with in_pieces(model, groups is not None):
        losses = model(tokens[:, :-1], tokens[:, 1:])
    (losses * torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)).sum().backward()
    grads = {}
    for name, param in model.named_parameters():
        grads[name] = param.grad
        if groups is not None:
            dist.all_reduce(param.grad, group=groups.replicas)
            grads[name] = unsharded(param, param.grad / groups.replica_size, groups.model)
    with torch.no_grad():
        quiet = model(tokens[:, :-1], tokens[:, 1:])
        logits = model(tokens[:, :-1])
    return losses.detach(), quiet, logits, grads


def shared_out(groups, layout):
    groups = groups.divided(**LAYOUTS[layout][1])
    found = {}
    for variant, changes in VARIANTS.items():
        model = build(groups.model, cp=groups.context, **changes)
        for length in LENGTHS:
            found[variant, length] = results(model, length, groups)
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request):
    return run_ranks(LAYOUTS[request.param][0], shared_out, request.param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_the_whole_models(ranks, variant):
    model = build(None, **VARIANTS[variant])
    for length in LENGTHS:
        truth = results(model, length)
        for rank in ranks:
            ours = rank[variant, length]
            for a, b in zip(ours[:3], truth[:3], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
            assert ours[3].keys() == truth[3].keys()
            for name, grad in ours[3].items():
                torch.testing.assert_close(grad, truth[3][name], rtol=1e-9, atol=1e-10, msg=name)
                assert torch.equal(grad, ranks[0][variant, length][3][name]), name


def hidden_states(groups, layout):
    """Return shapes between layers, bytes kept for backward, and dropout masks of two ranks."""
    groups = groups.divided(**LAYOUTS[layout][1])
    model = build(groups.model, cp=groups.context, dropout=0.5).train()
    seen = []
    model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    torch.manual_seed(3 + groups.replica_rank)
    model(torch.ones(1, 12, dtype=torch.long))
    heads = []
    attention = model.layers[1].attention
    attend = attention.attend

    def spy(call):
        heads.append((call.q_BHTE.shape, call.theta_HN))
        return attend(call)

    attention.attend = spy
    model.eval()(torch.ones(1, 12, dtype=torch.long))
    theta = model.theta.detach()
    assert sharding_of(model.theta) is not None
    return seen[0].detach(), heads[0][0], heads[0][1].detach(), theta


@pytest.mark.parametrize(("layout", "positions"), [("sequence parallel", 6), ("both", 3)])
def test_each_rank_has_its_positions_and_its_own_dropout(layout, positions):
    found = run_ranks(LAYOUTS[layout][0], hidden_states, layout)
    states = [each[0] for each in found]
    assert all(x.shape == (1, positions, 24) for x in states)
    dropped = [(x == 0).flatten().tolist() for x in states]
    assert all(a != b for i, a in enumerate(dropped) for b in dropped[:i])


@pytest.mark.parametrize(("layout", "heads"), [("Ulysses", 2), ("both", 1)])
def test_each_ranks_heads_keep_their_own_theta(layout, heads):
    found = run_ranks(LAYOUTS[layout][0], hidden_states, layout)
    whole = build(None).theta.detach()
    used = [each[2] for each in found]
    assert all(each[1] == (1, heads, 12, 6) for each in found)  # few heads, all positions
    order = [0, 1] if layout == "Ulysses" else [0, 2, 1, 3]  # tensor-parallel ranks innermost
    joined = torch.cat([used[i] for i in order])
    torch.testing.assert_close(joined, whole.to(joined), rtol=0, atol=0)


RUNS = {  # as trained, as broken off and resumed: dropout on
    "Ulysses": {"context_parallel_size": 2, **cell(3, "fp32")},
    "both": {"context_parallel_size": 2, "model_parallel_size": 2, "sequence_parallel": True,
             **cell(1, "bf16")},
}  # fmt: skip
EVALUATED = {"eval_lengths": [15, 41], "eval_tokens": 246}  # neither can be cut evenly


def jobs(groups, folder, prefix):
    for name, layout in RUNS.items():
        if LAYOUTS[name][0] != groups.world_size:
            continue
        train(groups, folder, prefix, name, **(DROPOUT | layout))
        if groups.is_main:
            rewind(folder / name, folder / f"{name}-broken", step=3)
        groups.barrier()
        train(groups, folder, prefix, f"{name}-broken", **(DROPOUT | layout))
        train(groups, folder, prefix, f"{name}-quiet", **(layout | EVALUATED | cell(1, "fp32")))


def alone(groups, folder, prefix):
    train(groups, folder, prefix, "alone", **EVALUATED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    prefix = write_shards(folder)
    run_ranks(1, alone, folder, prefix)
    for ranks in (2, 4):
        run_ranks(ranks, jobs, folder, prefix)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_resuming_is_bitwise_identical(runs, name):
    whole, broken = runs / name, runs / f"{name}-broken"
    assert len(digest(whole)) >= 4
    assert digest(whole) == digest(broken)
    assert rows(whole) == rows(broken) != rows(runs / f"{name}-quiet")


@pytest.mark.parametrize("name", RUNS)
def test_other_lengths_are_evaluated_as_by_one_process(runs, name):
    tables = [measured(runs / run) for run in ("alone", f"{name}-quiet")]
    assert len(tables[0]) == 2
    for ours, theirs in zip(*tables, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def recomputed(groups, layout):
    """Return gradients under dropout, without and with activation checkpointing."""
    groups = groups.divided(**LAYOUTS[layout][1])
    model = build(groups.model, cp=groups.context, dropout=0.3).train()
    found = []
    for again in (False, True):
        object.__setattr__(model.shape, "checkpoint_activations", again)
        torch.manual_seed(3 + groups.replica_rank)
        found.append(results(model, 12, groups)[3])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_activations_drop_the_same_numbers_again(layout):
    for kept, again in run_ranks(LAYOUTS[layout][0], recomputed, layout):
        for name, grad in kept.items():
            assert torch.equal(grad, again[name]), name
