"""Test named random streams and the loss."""

import math

import torch

from megatron.parallel import loss
from megatron.parallel.collectives import gather_from
from megatron.parallel.groups import build_groups
from megatron.parallel.loss import token_losses
from megatron.parallel.rng import derived_seed, named_generator, rng_state, set_rng_state
from megatron.parallel.sharding import Sharding
from tests.helpers.launch import run_ranks
from tests.helpers.peak import peak_bytes


def test_a_named_stream_depends_on_seed_and_name_alone():
    first = torch.randn(5, generator=named_generator(1, "layers.0.mlp"))
    torch.manual_seed(99)
    torch.randn(100)
    again = torch.randn(5, generator=named_generator(1, "layers.0.mlp"))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.randn(5, generator=named_generator(2, "layers.0.mlp")))
    assert not torch.equal(first, torch.randn(5, generator=named_generator(1, "layers.1.mlp")))


def test_no_two_seeds_share_a_stream():
    seeds = {derived_seed(seed, f"dropout {stream}") for seed in range(64) for stream in range(64)}
    assert len(seeds) == 64 * 64 and max(seeds) < 2**63


def test_rng_state_brings_dropout_back():
    state = rng_state()
    first = torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert not torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
    set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))


def test_token_losses_are_minus_log_softmax():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (2, 3))
    losses = token_losses(logits, targets)
    for b in range(2):
        for t in range(3):
            row = logits[b, t]
            expected = math.log(sum(math.exp(v) for v in row.tolist())) - row[targets[b, t]].item()
            assert abs(losses[b, t].item() - expected) < 1e-12


def test_losses_in_pieces_need_the_memory_of_a_piece(monkeypatch, tmp_path):
    output, x = torch.nn.Linear(8, 4096, bias=False), torch.randn(4, 256, 8, requires_grad=True)
    targets, logits_bytes = torch.randint(4096, (4, 256)), 4 * 256 * 4096 * 4

    def peak():
        return peak_bytes(
            lambda: loss.losses_in_pieces(output, x, targets, 4096).sum().backward(), tmp_path
        )

    assert peak() > 2 * logits_bytes
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 4 * 4096 * 16)
    assert peak() < logits_bytes / 3


def test_token_losses_are_fp32_for_16_bit_logits_and_stay_fp64():
    targets = torch.zeros(1, 2, dtype=torch.long)
    assert token_losses(torch.zeros(1, 2, 4, dtype=torch.bfloat16), targets).dtype == torch.float32
    assert token_losses(torch.zeros(1, 2, 4, dtype=torch.float64), targets).dtype == torch.float64


def extreme_losses(groups):
    """Return losses of logits whose exp overflows unless the group's maximum is subtracted."""
    tp = groups.divided(model_size=2).model
    whole = torch.tensor([[[-500.0, 3.0, 0.0, 900.0], [2.0, 1.0, -900.0, 1.0]]])
    targets = torch.tensor([[3, 0]])
    part = Sharding(2).slice(whole, tp.rank, 2).requires_grad_()
    losses = token_losses(part, targets, tp)
    losses.sum().backward()
    joined = gather_from(part.grad, tp, -1)
    return losses.detach(), joined, token_losses(whole, targets)


def test_cut_cross_entropy_does_not_overflow():
    for losses, grads, truth in run_ranks(2, extreme_losses):
        torch.testing.assert_close(losses, truth)
        assert torch.isfinite(grads).all()
        torch.testing.assert_close(grads.sum(-1), torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_a_process_alone_is_a_job_of_one():
    groups = build_groups(torch.device("cpu"))
    assert (groups.rank, groups.world_size, groups.data_size) == (0, 1, 1)
    assert groups.is_main
    assert torch.equal(groups.sum_over_data(torch.ones(2)), torch.ones(2))
