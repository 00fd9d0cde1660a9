"""Continue a batch of texts with a model, token by token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.generation.sampling import Sampling, sample
from megatron.generation.text import Continuation
from megatron.model import GPT
from megatron.parallel.groups import TensorGroup

PIECE = 1024
"""Prompts are read in pieces of this many tokens, so that memory is linear in their length."""


@dataclass
class Speed:
    """The speed of processing prompts and of generating tokens, summed over batches of prompts.

    Attributes:
        prompt_tokens: The number of tokens in the prompts.
        prompt_seconds: The time from the start of each batch until its first new tokens.
        tokens: The number of new tokens, not counting the first new token of each prompt.
        seconds: The time that it took to generate these new tokens.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


@torch.inference_mode()
def continue_texts(
    model: GPT, prompts: Sequence[Sequence[int]], texts: Sequence[Continuation],
    generators: Sequence[torch.Generator], *, how: Sampling, max_new_tokens: int,
    banned: Sequence[int], tp: TensorGroup, speed: Speed,
) -> None:  # fmt: skip
    """Continue each prompt until its continuation ends or has `max_new_tokens` tokens.

    Every rank of the job must call this function.

    Args:
        prompts: The token ids of each prompt. A prompt has at least one token.
        texts: The continuation of each prompt, to which the new tokens are added.
        generators: The random generator of each prompt.
        how: The settings for choosing tokens.
        banned: The ids of tokens that are never chosen.
        tp: The tensor-parallel group. It contains all ranks of the job.
        speed: The token counts and times of this call are added to this object.
    """
    # Rank 0 chooses the tokens and broadcasts them.
    began = time.monotonic()
    device = next(model.parameters()).device
    lengths_B = torch.tensor([len(ids) for ids in prompts])
    padded = [[0] * (int(lengths_B.max()) - len(ids)) + list(ids) for ids in prompts]
    cache = model.new_cache(lengths_B.to(device))
    ids_of = [list(ids) for ids in prompts]
    *pieces, tokens_BT = torch.tensor(padded, device=device).split(PIECE, 1)
    for piece_BT in pieces:
        model.extend(piece_BT, cache)
    for count in range(1, max_new_tokens + 1):
        logits_BV = model.extend(tokens_BT, cache)
        logits_BV[:, banned] = -torch.inf
        tokens_B = torch.zeros(len(texts), dtype=torch.int64)
        if tp.rank == 0:
            tokens_B = sample(logits_BV, how, generators, ids_of)
        tokens_B = tokens_B.to(device)
        if tp.size > 1:
            dist.broadcast(tokens_B, 0, group=tp.group)
        if count == 1:
            speed.prompt_tokens += int(lengths_B.sum())
            speed.prompt_seconds += time.monotonic() - began
            began = time.monotonic()
        for text, ids, token in zip(texts, ids_of, tokens_B.tolist(), strict=True):
            text.add(token)
            ids.append(token)
        if all(text.end for text in texts):
            break
        tokens_BT = tokens_B[:, None]
    for text in texts:
        text.finish("length")
    speed.tokens += sum(text.tokens - 1 for text in texts)
    speed.seconds += time.monotonic() - began
