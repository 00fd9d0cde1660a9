"""Test that a model on two tensor-parallel ranks equals the full model, also in checkpoints."""

import itertools
from unittest import mock

import pytest
import torch

from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.parallel import loss
from megatron.parallel.sharding import sharding_of, shardings_of
from tests.distributed.tensor_parallel_models import VARIANTS, build
from tests.helpers.jobs import (
    cell,
    digest,
    measured,
    rewind,
    rows,
    run_job,
    write_config,
    write_shards,
)
from tests.helpers.launch import call, run_ranks


def in_pieces(model, sharded):
    """Return a context in which sharded models with a `z_loss` take 4 positions at a time."""
    at_once = 3 * 32 * 4 if sharded and model.z_loss else loss.LOGITS_AT_ONCE
    return mock.patch.object(loss, "LOGITS_AT_ONCE", at_once)


def losses_and_gradients(model, tp):
    """Return (token losses, logits, gradients of unsharded parameters)."""
    tokens = torch.randint(0, 32, (3, 13), generator=torch.Generator().manual_seed(5))
    with in_pieces(model, tp is not None):
        losses = model(tokens[:, :-1], tokens[:, 1:])
    (losses * torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)).sum().backward()
    grads = {}
    for name, param in model.named_parameters():
        cut = sharding_of(param)
        alone = cut is None or tp is None
        grads[name] = param.grad if alone else cut.join(tp.gather(param.grad))
    with torch.no_grad():
        logits = model(tokens)
    return losses.detach(), logits, grads


def cut_models(groups):
    tp = groups.divided(model_size=2).model
    found = {}
    for name, changes in VARIANTS.items():
        model = build(tp, **changes)
        weights = {
            key: param.detach()
            if sharding_of(param) is None
            else sharding_of(param).join(tp.gather(param))
            for key, param in model.named_parameters()
        }
        results = losses_and_gradients(model, tp)
        found[name] = weights, results, sorted(shardings_of(model))
    return found


@pytest.fixture(scope="module")
def cut():
    return run_ranks(2, cut_models)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_the_whole_models(cut, variant):
    whole = build(None, **VARIANTS[variant])
    truth = losses_and_gradients(whole, None)
    for ours in cut:
        weights, (losses, logits, grads), cuts = ours[variant]
        assert len(cuts) > 8
        for name, param in whole.named_parameters():
            assert torch.equal(weights[name], param), name
        torch.testing.assert_close(losses, truth[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logits, truth[1], rtol=1e-10, atol=1e-10)
        assert grads.keys() == truth[2].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, truth[2][name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_agree_bit_for_bit_on_what_they_share(cut, variant):
    for a, b in zip(cut[0][variant][1][2].items(), cut[1][variant][1][2].items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


def dropout_streams(groups):
    tp = groups.divided(model_size=2).model
    found = {}
    for gpt_j, recompute in itertools.product((False, True), (False, True)):
        model = build(tp, dropout=0.3, gpt_j=gpt_j).train()
        object.__setattr__(model.shape, "checkpoint_activations", recompute)
        torch.manual_seed(3)
        hidden, seeds = [], []
        model.layers[0].register_forward_hook(lambda m, i, out, hidden=hidden: hidden.append(out))
        inner = model.layers[0].attention

        def spy(module, inputs, seeds=seeds):
            seeds.append(torch.get_rng_state())

        inner.dense.register_forward_pre_hook(spy)
        result = losses_and_gradients(model, tp)
        heads = inner.query_key_value.weight.grad
        found[gpt_j, recompute] = hidden[0].detach(), seeds[0], result, heads
    torch.manual_seed(4)
    from megatron.parallel.rng import rank_dropout

    with rank_dropout(tp, torch.device("cpu")):
        inside = torch.rand(8)
    return found, inside, torch.rand(8)


def test_dropout_is_alike_outside_the_cut_and_differs_inside():
    (ours, inside, outside), (theirs, inside_other, outside_other) = run_ranks(2, dropout_streams)
    assert not torch.equal(inside, inside_other) and torch.equal(outside, outside_other)
    for key, (hidden, state, result, _) in ours.items():
        assert torch.equal(hidden, theirs[key][0]), key
        assert torch.equal(state, theirs[key][1]), key
        assert torch.equal(result[0], theirs[key][2][0]), key
    for gpt_j in (False, True):  # recomputed activations drop the same numbers again
        for name, grad in ours[gpt_j, False][2][2].items():
            assert torch.equal(grad, ours[gpt_j, True][2][2][name]), name


JOB = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "save_interval": 3,
    "eval_lengths": [16, 32],
    "eval_tokens": 256,
    "num_kv_heads": 2,
    "use_qk_layernorm": True,
    "qk_layernorm_kind": "shared",
    "gpt_j_residual": True,
    "gpt_j_tied": True,
    "output_layer_bias": True,
    "activation": "swiglu",
    "mlp_multiple_of": 2,
}
CUT = {"model_parallel_size": 2, "make_vocab_size_divisible_by": 16}
STAGES = [(1, "fp32"), (3, "fp32"), (1, "bf16")]


def jobs(groups, folder, prefix):
    for (stage, precision), drop in itertools.product(STAGES, (0.0, 0.2)):
        whole, broken = (folder / f"{stage}-{precision}-{drop}-{k}" for k in ("whole", "broken"))
        for run in (whole, broken):
            if run is broken and groups.is_main:
                rewind(whole, broken, step=3)
            keys = {"hidden_dropout": drop, "attention_dropout": drop, "no_weight_tying": True}
            keys |= JOB | CUT | cell(stage, precision) | {"save": str(run), "load": str(run)}
            if groups.is_main:
                write_config(folder / f"{run.name}.yml", prefix, **keys)
            groups.barrier()
            run_job(groups, folder / f"{run.name}.yml")


def alone(groups, folder, prefix):
    """Train in one process: the reference, and a run from the checkpoint of a sharded run."""
    base = JOB | {"make_vocab_size_divisible_by": 16, "no_weight_tying": True}
    run_job(groups, write_config(folder / "a.yml", prefix, save=str(folder / "alone"), **base))
    for stage in (1, 3):
        load_from = {"load": str(folder / f"{stage}-fp32-0.0-whole"), "finetune": True}
        keys = base | load_from | {"train_iters": 1, "save": str(folder / f"tuned-{stage}")}
        run_job(groups, write_config(folder / "t.yml", prefix, **keys))


def tune_cut(groups, folder, prefix):
    """Train on two tensor-parallel ranks from an unsharded checkpoint, with each ZeRO stage."""
    for stage in (0, 1, 3):
        keys = JOB | CUT | cell(stage, "fp32") | {"no_weight_tying": True, "train_iters": 1}
        keys |= {"load": str(folder / "alone"), "finetune": True}
        keys |= {"save": str(folder / f"tuned-cut-{stage}")}
        if groups.is_main:
            write_config(folder / f"c{stage}.yml", prefix, **keys)
        groups.barrier()
        run_job(groups, folder / f"c{stage}.yml")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    prefix = write_shards(folder)
    run_ranks(2, jobs, folder, prefix)
    run_ranks(1, alone, folder, prefix)
    run_ranks(2, tune_cut, folder, prefix)
    return folder


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_a_cut_run_resumes_bit_for_bit(runs, stage, precision, drop):
    whole, broken = (runs / f"{stage}-{precision}-{drop}-{k}" for k in ("whole", "broken"))
    assert newest(whole).tag == newest(broken).tag == "global_step6"
    assert len(digest(whole)) >= 5  # two ranks' weights, optimizer and random streams
    assert digest(whole) == digest(broken)
    assert rows(whole) == rows(broken)


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_its_checkpoint_holds_the_whole_model(runs, stage, precision):
    ours = Saved(runs / f"{stage}-{precision}-0.0-whole", "global_step6").weights()
    truth = Saved(runs / "alone", "global_step6").weights()
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        assert ours[name].shape == value.shape, name
        if name.endswith("key_norm.bias"):
            continue  # softmax cancels it without rotary: its gradient is rounding alone
        error = (ours[name].float() - value).abs().max()
        # Adam turns a sign flip of a tiny bf16 gradient into a whole step of 0.01
        assert error < (1e-5 if precision == "fp32" else 0.1), name
    record = Saved(runs / f"{stage}-{precision}-0.0-whole", "global_step6").record
    assert record.layout["model_parallel_size"] == 2
    assert record.cuts["embedding.theta"] == [0, 1]


@pytest.mark.parametrize("stage", [1, 3])
def test_its_weights_start_a_run_of_one_process(runs, stage):
    first = rows(runs / f"tuned-{stage}")[1]
    assert first < rows(runs / "alone")[1] - 0.5
    assert first == pytest.approx(rows(runs / "tuned-1")[1], abs=2e-6)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_weights_of_one_process_start_a_cut_run(runs, stage):
    assert rows(runs / f"tuned-cut-{stage}")[1] == pytest.approx(
        rows(runs / "tuned-1")[1], abs=5e-6
    )


def test_one_process_evaluates_it_with_the_runs_own_config(runs, tmp_path):
    run = runs / "1-fp32-0.0-whole"
    call("evaluate.py", run / "config.yml", "--load", run, "--out", tmp_path)
    tables = [measured(path) for path in (run, tmp_path)]
    assert len(tables[0]) == len(tables[1]) == 2
    for ours, theirs in zip(*tables, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
