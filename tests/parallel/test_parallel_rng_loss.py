"""Test named random streams and the loss."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron.parallel import loss
from megatron.parallel.collectives import gather_from
from megatron.parallel.groups import TensorGroup, build_groups
from megatron.parallel.loss import (
    UNCOUNTED,
    inputs_and_targets,
    mean_loss,
    perplexity,
    token_losses,
)
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


def formula(logits_BTV, targets_BT, z_loss):
    """Return the losses in float64, and the gradient of their weighted sum: weights 1, 2, 3, ..."""
    logits_BTV = logits_BTV.detach().clone().requires_grad_()
    lse_BT = logits_BTV.exp().sum(-1).log()
    hit_BT = logits_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses_BT = (lse_BT - hit_BT + z_loss * lse_BT**2) * (targets_BT != UNCOUNTED)
    weighted(losses_BT).backward()
    return losses_BT.detach(), logits_BTV.grad


def weighted(losses_BT):
    return (losses_BT * torch.arange(1.0, losses_BT.numel() + 1).view_as(losses_BT)).sum()


def example():
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    return logits, torch.tensor([[0, 3, 4], [7, UNCOUNTED, 5]])


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_losses_and_gradients_are_those_of_the_formula(z_loss):
    logits, targets = example()
    losses, gradient = formula(logits, targets, z_loss)
    ours = logits.clone().requires_grad_()
    found = token_losses(ours, targets, z_loss=z_loss)
    weighted(found).backward()
    torch.testing.assert_close(found.detach(), losses)
    torch.testing.assert_close(ours.grad, gradient)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_a_sharded_vocabulary_has_the_same_losses_and_gradients(monkeypatch, ranks, z_loss):
    """Each rank is a thread; their sums and maxima are taken when all have come."""
    logits, targets = example()
    losses, gradient = formula(logits, targets, z_loss)
    barrier, given, width = threading.Barrier(ranks, timeout=60), {}, 8 // ranks

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        given[group] = tensor.clone()
        barrier.wait()
        every = torch.stack([given[rank] for rank in range(ranks)])
        tensor.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.sum(0))
        barrier.wait()

    monkeypatch.setattr(loss.dist, "all_reduce", all_reduce)

    def on_rank(rank):
        part = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
        tp = TensorGroup(group=rank, rank=rank, size=ranks)
        found = token_losses(part, targets, tp, z_loss)
        return found, part

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(on_rank, range(ranks)))
    for each, _ in found:
        torch.testing.assert_close(each.detach(), losses)
        weighted(each).backward()
    joined = torch.cat([part.grad for _, part in found], -1)
    torch.testing.assert_close(joined, gradient)


@pytest.mark.parametrize(
    ("ranks", "at_once", "pieces"), [(1, 8, 6), (1, 16, 6), (1, 40, 3), (1, 64, 2), (2, 40, 3)]
)
def test_pieces_have_at_most_so_many_logits(monkeypatch, ranks, at_once, pieces):
    """Two sequences of 6 targets and a vocabulary of 8: 16 logits for each position.

    Two ranks split each sequence, and a piece has the same positions of both slices.
    """
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 8, (2, 6), generator=generator)
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
    calls = []

    def logits_of(x_BPD):
        calls.append(x_BPD.shape[1])
        slices = [logits[:, rank * 6 // ranks :][:, : 6 // ranks] for rank in range(ranks)]
        return torch.cat([each[:, x_BPD[0, :, 0].long()] for each in slices], 1) * scale

    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    x = torch.arange(6.0 // ranks)[None, :, None].expand(2, -1, 1)
    found = loss.losses_in_pieces(logits_of, x, targets, 8, ranks=ranks, z_loss=0.3)
    torch.testing.assert_close(found.detach(), formula(logits, targets, 0.3)[0])
    assert len(calls) == pieces
    found.sum().backward()  # which computes each piece again
    assert len(calls) == 2 * pieces
    with torch.no_grad():
        loss.losses_in_pieces(logits_of, x, targets, 8, ranks=ranks)
    assert len(calls) == 3 * pieces


def test_means_and_perplexities():
    losses = torch.tensor([[1.0, 5.0, 0.0]])
    targets = torch.tensor([[3, 4, UNCOUNTED]])
    assert mean_loss(losses, targets) == 3.0
    assert mean_loss(losses, targets, torch.tensor(4.0)) == 1.5
    assert mean_loss(0 * losses, torch.full((1, 3), UNCOUNTED)) == 0.0
    assert perplexity(math.log(8)) == pytest.approx(8) and perplexity(710.0) == math.inf
    assert perplexity(709.7) == math.exp(709.7)


def test_tokens_stored_as_their_complement_are_read_but_do_not_count():
    inputs, targets = inputs_and_targets(torch.tensor([[~0, 5, ~7, 0, 2]]))
    assert inputs.tolist() == [[0, 5, 7, 0]] and targets.tolist() == [[5, -1, 0, 2]]


def test_a_process_alone_is_a_job_of_one():
    groups = build_groups(torch.device("cpu"))
    assert (groups.rank, groups.world_size, groups.data_size) == (0, 1, 1)
    assert groups.is_main
    assert torch.equal(groups.sum_over_data(torch.ones(2)), torch.ones(2))
