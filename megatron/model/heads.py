"""Divide the output of the projection `query_key_value` into heads.

For each key head, the output holds the queries of its G query heads, then its key, then its value:
[K, (q ... q k v), E]. With G = 1, this is the order of GPT-NeoX's checkpoints. Exports contain this
file (see `megatron.hub.bundle`).

Legend: B batch, T positions, H heads, K key heads, G query heads per key head, E head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_key_heads(
    qkv_BTW: Tensor, group: int, size: int, norm: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Divide the output of the projection `query_key_value` into key heads.

    Return [batch, key heads, positions, (group + 2) * size].

    Args:
        group: The number of query heads that share a key head.
        size: The head size.
        norm: A function that normalises queries or keys [batch, positions, query heads, size], or
            None. With a norm, each query head gets its own copy of its key head, as in gpt-neox.
            The result is then [batch, query heads, positions, 3 * size].
    """
    qkv = qkv_BTW.unflatten(-1, (-1, group + 2, size))
    if norm is not None:
        q, *kv = qkv.split([group, 1, 1], dim=3)
        q, k, v = (x.expand_as(q).flatten(2, 3) for x in (q, *kv))
        qkv = torch.stack((norm(q), norm(k), v), dim=3)
    return qkv.flatten(3).transpose(1, 2)


def divide_heads(qkv_BKTW: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the result of `by_key_heads` into queries, keys and values.

    Return q [batch, query heads, positions, size], and k and v [batch, key heads, positions, size].
    """
    group = qkv_BKTW.shape[-1] // size - 2
    q, k, v = qkv_BKTW.split([group * size, size, size], dim=-1)
    if group > 1:
        q = q.unflatten(-1, (group, size)).transpose(2, 3).flatten(1, 2)
    return q, k, v
