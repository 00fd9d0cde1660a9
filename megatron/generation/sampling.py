"""Choose the next token of each text from the model's logits.

    p_v = softmax_v(logits / temperature)

`top_k` keeps the k most likely tokens, and rescales their probabilities to the sum 1. `top_p` then
keeps the smallest set of most likely tokens whose probabilities sum to at least `top_p`. If tokens
are equally likely, the token with the smaller id is kept first. `min_p` then keeps the tokens that
are at least `min_p` times as likely as the most likely token. Temperature 0 always chooses the most
likely token.

Before these steps, `repetition_penalty` changes the logits of the tokens that occur in the prompt
or its continuation. A positive logit is divided by the penalty, and a negative logit is multiplied
by the penalty (Keskar et al. 2019, arXiv 1909.05858). `min_p` (Nguyen et al. 2024, arXiv
2407.01082) and the penalty are defined as in Hugging Face's transformers.

Legend: B texts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engine.errors import DivergedError


@dataclass(frozen=True)
class Sampling:
    """The settings for sampling the next token. By default, every token can be sampled.

    Attributes:
        temperature: The divisor of the logits. 0 always selects the most likely token.
        top_k: Keep this number of the most likely tokens. None keeps all tokens.
        top_p: Keep the most likely tokens until their probabilities add up to at least this value.
            1 keeps all tokens.
        min_p: Keep a token only if its probability divided by the largest probability is at least
            this value.
        repetition_penalty: The penalty for tokens that already occur in the text. A positive logit
            is divided by the penalty, and a negative logit is multiplied by the penalty. The
            penalty must be above 0. 1 has no effect.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def probabilities(logits_BV: Tensor, how: Sampling) -> Tensor:
    """Return the probability with which each token is chosen, float64 [batch, vocabulary].

    Args:
        logits_BV: The logits, [batch, vocabulary].
        how: The settings for sampling. The temperature must be above 0.
    """
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / how.temperature
    unlikely_BV = scaled_BV.exp() < how.min_p
    if how.top_k is None and how.top_p == 1.0:
        return scaled_BV.masked_fill(unlikely_BV, -torch.inf).softmax(-1)
    sorted_BV, token_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    if how.top_k is not None:
        sorted_BV[:, how.top_k :] = -torch.inf
    probs_BV = sorted_BV.softmax(-1)
    beyond_BV = probs_BV.cumsum(-1) - probs_BV >= how.top_p
    beyond_BV[:, 0] = False
    probs_BV = probs_BV.masked_fill(beyond_BV, 0.0)
    probs_BV = torch.zeros_like(probs_BV).scatter(1, token_BV, probs_BV)
    probs_BV = probs_BV.masked_fill(unlikely_BV, 0.0)
    return probs_BV / probs_BV.sum(-1, keepdim=True)


def penalised(logits_BV: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Return the logits after the repetition penalty, [batch, vocabulary].

    Args:
        logits_BV: The logits, [batch, vocabulary].
        texts: The token ids of each text so far, including the prompt.
        penalty: The divisor of positive logits and factor of negative logits.
    """
    result_BV = logits_BV.clone()
    for row_V, ids in zip(result_BV, texts, strict=True):
        seen = torch.tensor(ids, device=row_V.device).unique()
        values = row_V[seen]
        row_V[seen] = torch.where(values < 0, values * penalty, values / penalty)
    return result_BV


def sample(
    logits_BV: Tensor,
    how: Sampling,
    generators: Sequence[torch.Generator],
    texts: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Choose the next token of each text, and return its id, int64 [batch], on the CPU.

    Args:
        logits_BV: The logits, [batch, vocabulary].
        generators: One CPU random generator for each text.
        texts: The token ids of each text so far, for the repetition penalty.

    Raises:
        DivergedError: The largest logit of a text is infinite or not a number.
    """
    # With one generator for each text, the draws for one text do not depend on the other texts of
    # the batch.
    logits_BV = logits_BV.to("cpu", torch.float64)
    if not logits_BV.amax(-1).isfinite().all():
        raise DivergedError("the model's logits are not finite; -o precision=fp32 may help")
    if how.repetition_penalty != 1.0:
        logits_BV = penalised(logits_BV, texts, how.repetition_penalty)
    if how.temperature == 0.0:
        return logits_BV.argmax(-1)
    rows = zip(probabilities(logits_BV, how), generators, strict=True)
    return torch.cat([torch.multinomial(probs_V, 1, generator=each) for probs_V, each in rows])
