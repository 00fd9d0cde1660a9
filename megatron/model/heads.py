"""Divide the output of the projection `query_key_value` into heads.

For each key head, the output contains the queries of G query heads, then the key, then the value:
[K, (q ... q k v), E]. With G = 1, this is the order of GPT-NeoX's checkpoints. Exports contain this
file (see `megatron.hub.bundle`).

Legend: B batch, T positions, H heads, K key heads, G query heads per key head, E head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def by_key_heads(
    qkv_BTW: Tensor,
    group: int,
    size: int,
    norm: Callable[[Tensor], Tensor] | None = None,
    *,
    copies: int = 1,
) -> Tensor:
    """Divide the output of the QKV projection into key heads.

    Return [batch, key heads * copies, positions, (group / copies + 2) * size].

    Args:
        qkv_BTW: The output of the projection [batch, positions, key heads * (group + 2) * size].
        group: The number of query heads that share a key head.
        size: The head size.
        norm: A function that normalises queries or keys [batch, positions, query heads, size]. None
            means no norm.
        copies: The number of copies of each key head. If `norm` is given, this argument is ignored,
            and the number of copies is `group`.
    """
    qkv = qkv_BTW.unflatten(-1, (-1, group + 2, size))
    copies = copies if norm is None else group  # as in gpt-neox
    if norm is not None or copies > 1:
        q, *kv = qkv.split([group, 1, 1], dim=3)
        each = (q, *(x.expand(-1, -1, -1, copies, -1) for x in kv))
        q, k, v = (x.unflatten(3, (copies, -1)).flatten(2, 3) for x in each)
        if norm is not None:
            q, k = (norm(x.squeeze(3)).unsqueeze(3) for x in (q, k))
        qkv = torch.cat((q, k, v), dim=3)
    return qkv.flatten(3).transpose(1, 2)


def normed_heads(
    qkv_BTW: Tensor,
    group: int,
    size: int,
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    *,
    joined: bool,
) -> Tensor:
    """Return the output of the QKV projection with normalised queries and keys.

    Args:
        qkv_BTW: The output of the projection.
        group: The number of query heads that share a key head.
        size: The head size.
        norms: The norm of queries, and the norm of keys.
        joined: Whether a norm treats all heads as one vector.
    """
    q, k, v = qkv_BTW.unflatten(-1, (-1, group + 2, size)).split([group, 1, 1], dim=3)
    q, k = (
        norm(x.flatten(2)).view_as(x) if joined else norm(x)
        for x, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat((q, k, v), dim=3).flatten(2)


def divide_heads(qkv_BKTW: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Separate the queries, keys and values in the output of the QKV projection.

    Return q [batch, query heads, positions, size], and k and v [batch, key heads, positions, size].

    Args:
        qkv_BKTW: The output of the projection, with one block for each key head, as `by_key_heads`
            returns it.
        size: The head size.
    """
    group = qkv_BKTW.shape[-1] // size - 2
    # divided before positions and heads change places: then autograd joins gradients with one copy
    parts = qkv_BKTW.transpose(1, 2).split([group * size, size, size], dim=-1)
    q, k, v = (part.transpose(1, 2) for part in parts)
    if group > 1:
        q = q.unflatten(-1, (group, size)).transpose(2, 3).flatten(1, 2)
    return q, k, v
