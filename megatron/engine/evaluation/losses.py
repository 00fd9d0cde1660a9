"""Perplexity by sequence length, each token predicted from all that precedes it in its sequence.

    loss(L)   = mean over sequences s and positions t of -log p(x_{s,t+1} | x_{s,<=t})   [nats]
    ppl(L)    = exp(loss(L))
    bits/byte = loss(L) * tokens / (ln 2 * bytes)
    stderr(L) = std over sequences of their mean loss / sqrt(sequences)

Sequences do not overlap, and every length reads the same span of text. Two baselines show the same
model without long range: the text cut into pieces of c tokens (each token has 1 ... c predecessors,
c / 2 on average), and single tokens given exactly c predecessors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron.engine.evaluation.report import LengthResult
from megatron.parallel import Groups

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(inputs [B, T], targets [B, T]) -> loss of each target [B, T], nats."""


@torch.no_grad()
def mean_losses(
    loss_fn: LossFn,
    sequences: np.ndarray,
    groups: Groups,
    *,
    batch_tokens: int,
    last_only: bool = False,
) -> np.ndarray:
    """Mean loss of each row of `sequences` int64 [n, L + 1], float64 [n], equal on every rank.

    Rows are dealt to the ranks in batches of about `batch_tokens` tokens. Every rank runs the same
    number of forward passes, as parameter sharding (ZeRO-3) needs.

    Args:
        last_only: score the last position alone.
    """
    count, length = sequences.shape[0], sequences.shape[1] - 1
    rows = max(1, batch_tokens // length)
    batches = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
    rounds = -(-len(batches) // groups.data_size)
    losses = torch.zeros(count, dtype=torch.float64)
    for turn in range(rounds):
        mine = turn * groups.data_size + groups.data_rank
        where = batches[min(mine, len(batches) - 1)]
        batch = torch.from_numpy(sequences[where]).to(groups.device)
        token_losses = loss_fn(batch[:, :-1], batch[:, 1:]).double()
        if mine < len(batches):
            scored = token_losses[:, -1] if last_only else token_losses.mean(1)
            losses[where] = scored.cpu()
    return groups.sum_over_data(losses.to(groups.device)).cpu().numpy()


def by_length(
    loss_fn: LossFn,
    read: Callable[[int], np.ndarray],
    lengths: Sequence[int],
    groups: Groups,
    *,
    token_bytes: Callable[[np.ndarray], np.ndarray],
    batch_tokens: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[LengthResult]:
    """Evaluate at each of `lengths`, in order.

    Args:
        read: length -> int64 [n, length + 1], the sequences of that length.
        token_bytes: token ids -> UTF-8 bytes that each stands for.
        say: receives one progress line a length.
    """
    results = []
    for length in lengths:
        start = time.monotonic()
        sequences = read(length)
        losses = mean_losses(loss_fn, sequences, groups, batch_tokens=batch_tokens)
        result = summarise(length, losses, sequences[:, 1:], token_bytes)
        results.append(result)
        seconds = time.monotonic() - start
        say(
            f"length {length}: perplexity {result.perplexity:.4f} over {len(sequences)} sequences "
            f"({sequences[:, 1:].size / seconds:,.0f} tokens/s)"
        )
    return results


def limited_context(
    loss_fn: LossFn,
    sequences: np.ndarray,
    context: int,
    groups: Groups,
    *,
    targets: int,
    token_bytes: Callable[[np.ndarray], np.ndarray],
    batch_tokens: int,
) -> LengthResult:
    """The same model given exactly `context` preceding tokens for each scored token.

    Windows are taken evenly from `sequences` int64 [n, L + 1], about `targets` of them.
    """
    windows = np.lib.stride_tricks.sliding_window_view(sequences, context + 1, axis=1)
    windows = windows.reshape(-1, context + 1)
    windows = np.ascontiguousarray(windows[:: max(1, len(windows) // targets)])
    losses = mean_losses(loss_fn, windows, groups, batch_tokens=batch_tokens, last_only=True)
    return summarise(context, losses, windows[:, -1:], token_bytes)


def summarise(
    length: int,
    losses: np.ndarray,
    scored: np.ndarray,
    token_bytes: Callable[[np.ndarray], np.ndarray],
) -> LengthResult:
    """Statistics of per-sequence mean losses; `scored` holds the target tokens."""
    loss = float(losses.mean())
    bytes_scored = int(token_bytes(scored.ravel()).sum())
    stderr = float(losses.std(ddof=1) / math.sqrt(len(losses))) if len(losses) > 1 else math.nan
    return LengthResult(
        length=length,
        sequences=len(losses),
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=loss * scored.size / (math.log(2) * bytes_scored),
        stderr=stderr,
    )
