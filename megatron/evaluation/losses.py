"""Compute the losses of sequences, in nats per token. All ranks get the same result."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron import preemption
from megatron.config import Config
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.local_model import Model
from megatron.engine.training.batches import on_device
from megatron.engine.training.pipeline_engine import LossFn, never_compiled
from megatron.parallel.groups import Groups

NOT_FINITE = "the model's losses are not finite; -o precision=fp32 may help"


@dataclass(frozen=True)
class MeasuredModel:
    """A model that is evaluated by length, with everything that the evaluation needs.

    Attributes:
        config: The config. Its section `evaluation` selects what is measured.
        groups: The job's process groups.
        loss_fn: The function that returns the loss of each target token. Without targets, it
            returns logits.
        module: The model, or the shard of it that this rank holds.
        tokenizer: The tokenizer with which the text was made.
        theta_HN: The learned parameters of the positional embedding, fp32 [heads, parameters per
            head]; None if there are none.
        step: The number of optimizer steps that the model was trained for.
    """

    config: Config
    groups: Groups
    loss_fn: Callable[..., torch.Tensor]
    module: Model
    tokenizer: Tokenizer
    theta_HN: torch.Tensor | None
    step: int = 0


def losses_of_sequences(
    loss_fn: LossFn, sequences: np.ndarray, groups: Groups, *, batch_tokens: int,
    last_only: bool = False, uncounted_after: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the mean loss of each of n sequences, in nats per token, as float64 [n].

    Every rank must call this function, because the sequences are divided among the data-parallel
    ranks.

    Args:
        loss_fn: The function that returns the loss of each target token.
        sequences: The tokens of n sequences with L targets each, int64 [n, L + 1].
        groups: The job's process groups.
        batch_tokens: The approximate number of tokens in a forward pass.
        last_only: Whether to score only the last position of each sequence.
        uncounted_after: The id of a token. Targets directly after this token are not scored. None
            scores all targets.
    """
    # With `uncounted_after`, the results are scaled, so that their mean is the mean loss of all
    # scored targets.

    def score(losses_BT: torch.Tensor, inputs_BT: torch.Tensor) -> torch.Tensor:
        if uncounted_after is not None:
            losses_BT = losses_BT.masked_fill(inputs_BT == uncounted_after, 0.0)
        return losses_BT[:, -1:] if last_only else losses_BT.mean(1, keepdim=True)

    losses = scores_of_sequences(
        loss_fn, sequences, groups, batch_tokens=batch_tokens, score=score, width=1
    )[:, 0]
    if uncounted_after is None or last_only:
        return losses
    return losses / max(1e-9, float((sequences[:, :-1] != uncounted_after).mean()))


@never_compiled()
@torch.no_grad()
def scores_of_sequences(
    loss_fn: LossFn, sequences: np.ndarray, groups: Groups, *, batch_tokens: int,
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], width: int,
    tick: Callable[[int], object] = lambda tokens: None,
) -> np.ndarray:  # fmt: skip
    """Return `width` scores of each of n sequences, as float64 [n, width].

    Every rank must call this function, because the sequences are divided among the data-parallel
    ranks.

    Args:
        loss_fn: The function that returns the loss of each target token.
        sequences: The tokens of n sequences with L targets each, int64 [n, L + 1].
        groups: The job's process groups.
        batch_tokens: The approximate number of tokens in a forward pass.
        score: A function that computes the scores of a batch of B sequences. Its arguments are the
            losses (fp64) and the inputs, both [B, L]. It returns [B, width].
        width: The number of scores of each sequence.
        tick: A function that is called after each forward pass. Its argument is the number of
            tokens in the pass.
    """
    count, length = sequences.shape[0], sequences.shape[1] - 1
    rows = max(1, batch_tokens // length)
    batches = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
    # ZeRO-3 gathers the weights in each forward pass, so all ranks run equally many.
    rounds = -(-len(batches) // groups.data_size)
    scores = torch.zeros(count, width, dtype=torch.float64)
    for turn in range(rounds):
        preemption.safe_point()
        mine = turn * groups.data_size + groups.data_rank
        where = batches[min(mine, len(batches) - 1)]
        batch = on_device(sequences[where], groups.device)
        token_losses = loss_fn(batch[:, :-1], batch[:, 1:]).double()
        if mine < len(batches):
            scores[where] = score(token_losses, batch[:, :-1]).cpu()
        tick(batch[:, 1:].numel())
    return groups.sum_over_data(scores.to(groups.device)).cpu().numpy()
