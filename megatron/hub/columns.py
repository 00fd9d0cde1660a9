"""Compute positions, padding and documents from the arguments of an exported model.

The texts of a batch may be padded, and a row may contain several documents. The column of a token
is its index in the row. The position of a token is its value in `position_ids`. Without
`position_ids`, positions are counted from the first token of the row that is not padding. A token
with position 0 begins a document. Tokens attend neither to padding nor to other documents.

Legend: B rows, T new tokens, S all tokens (cached ones and new ones).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from megatron.attention.call import document_starts, starts_from_ids

_WRONG = {
    "attention_mask": "must be 0 for padding and 1 for other tokens",
    "attention_mask between tokens": "is 0: this model takes padding only at the ends of a text",
    "position_ids": "must rise by 1, or restart at 0 with a new document",
}


@dataclass
class Columns:
    """The columns and positions of new tokens in texts that may be padded or packed.

    A column is an index into all tokens of a row, including padding. A position does not count
    padding.

    Attributes:
        offset: The column of the first new token. None in a compiled graph with a static cache,
            where the number is known only on the device.
        columns_T: The column of each new token.
        positions_BT: The position of each new token.
        first_BT: The first column to which each new token may attend. None if all tokens may attend
            to column 0.
        ended_BT: Whether each new token is an end-of-document token. None if the model does not use
            this token to separate documents.
        vectors: The bias vectors computed so far. Several layers may use the same vector.
    """

    offset: int | None
    columns_T: Tensor
    positions_BT: Tensor
    # A padding token sees only itself.
    first_BT: Tensor | None = None
    ended_BT: Tensor | None = None
    vectors: dict = field(default_factory=dict)

    def to(self, device: Any, **_: Any) -> Columns:
        """Return a copy whose tensors are on `device`. The library accelerate calls this method."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def columns_of(
    x_BTD: Tensor, mask_BS: Tensor | None, position_ids: Tensor | None, cache: Cache | None
) -> Columns:
    """Return the columns and positions of the new tokens.

    Args:
        x_BTD: The vectors of the new tokens, [batch, new tokens, features].
        mask_BS: The attention mask: 0 where a token is padding, otherwise 1.
        position_ids: The position of each new token, [batch or 1, new tokens].
        cache: The cache of the tokens before the new tokens, or None.

    Raises:
        ValueError: The model does not support the mask or the positions.
    """
    shape, device, graph = x_BTD.shape[:2], x_BTD.device, torch.compiler.is_compiling()
    cached: Any = cache.get_seq_length() if cache is not None else 0
    if isinstance(cached, Tensor) and not graph:
        cached = int(cached)
    columns_T = torch.arange(shape[1], device=device) + cached
    at = Columns(None if isinstance(cached, Tensor) else cached, columns_T, columns_T.expand(shape))
    if mask_BS is None and position_ids is None:
        return at
    first_BT = torch.zeros_like(at.positions_BT)
    seen_BS = seen_BT = None
    if mask_BS is not None:
        seen_BS = _seen(mask_BS.to(device), shape, at.offset, cache)
        seen_BT = seen_BS.index_select(1, columns_T)
        first_BT = first_BT + (seen_BS.cumsum(1) == 0).sum(1, keepdim=True)
        at.positions_BT = (columns_T - first_BT).clamp(min=0)
    if position_ids is not None:
        at.positions_BT = position_ids.to(device).expand(shape)
        first_BT = first_BT.maximum(columns_T - at.positions_BT)
    if seen_BT is not None:
        first_BT = torch.where(seen_BT, first_BT, columns_T)
    # In a compiled graph, the check would wait for the device.
    if not graph:
        _refuse(mask_BS, seen_BS, seen_BT, None if position_ids is None else at.positions_BT)
    at.first_BT = first_BT if graph or first_BT.any() else None
    return at


def _seen(mask_BS: Tensor, shape: Any, offset: int | None, cache: Cache | None) -> Tensor:
    """Return which tokens are seen, that is, are not padding, as bool [batch, tokens].

    Raises:
        ValueError: The mask has a wrong shape.
    """
    static = cache is not None and cache.is_compileable
    total = mask_BS.shape[-1] if offset is None else offset + shape[1]
    fits = mask_BS.dim() == 2 and mask_BS.shape[0] == shape[0]
    if not fits or mask_BS.shape[1] < total or (mask_BS.shape[1] > total and not static):
        wanted, found = [shape[0], total], list(mask_BS.shape)
        raise ValueError(f"attention_mask must be {wanted}, 1 or 0 for each token, not {found}")
    return mask_BS[:, :total].bool()


def _refuse(
    mask_BS: Tensor | None, seen_BS: Tensor | None, seen_BT: Tensor | None, ids_BT: Tensor | None
) -> None:
    """Raise `ValueError` if the model does not support the mask or the positions."""
    wrong = {}
    if mask_BS is not None and seen_BS is not None:
        padded = seen_BS[:, 1:] & ~seen_BS[:, :-1] & (seen_BS.cumsum(1) > 0)[:, :-1]
        wrong["attention_mask"] = ((mask_BS != 0) & (mask_BS != 1)).any().to(seen_BS.device)
        wrong["attention_mask between tokens"] = padded.any()
    if ids_BT is not None:
        jumps_BT = (ids_BT[:, 1:] - ids_BT[:, :-1] != 1) & (ids_BT[:, 1:] != 0)
        if seen_BT is not None:
            jumps_BT = jumps_BT & seen_BT[:, 1:] & seen_BT[:, :-1]
        wrong["position_ids"] = jumps_BT.any() | (ids_BT < 0).any()
    found = torch.stack(list(wrong.values())).tolist()  # waits for the device only once
    for name, is_wrong in zip(wrong, found, strict=True):
        if is_wrong:
            raise ValueError(f"{name} {_WRONG[name]}")


def packed_positions(
    position_ids: Tensor | None, seq_idx: Tensor | None, *cu_seq_lens: Tensor | None
) -> Tensor | None:
    """Return the position of each token in its document, or None if no argument is given.

    The arguments are different ways to describe packed documents.

    Args:
        position_ids: The position of each token.
        seq_idx: A number for each token. Adjacent tokens with the same number belong to the same
            document.
        cu_seq_lens: The index of the first token of each document, and at the end the number of all
            tokens.

    Raises:
        ValueError: The arguments describe different documents.
    """
    meant = [] if position_ids is None else [position_ids]
    if seq_idx is not None:
        meant.append(
            torch.arange(seq_idx.shape[1], device=seq_idx.device) - starts_from_ids(seq_idx)
        )
    for ends in cu_seq_lens:
        if ends is not None:
            lengths = ends.diff().tolist()
            meant.append(torch.cat([torch.arange(n, device=ends.device) for n in lengths])[None])
    for other in meant[1:]:  # a graph of `torch.export` cannot compare numbers
        if other.shape != meant[0].shape or not torch.equal(other.long(), meant[0].long()):
            raise ValueError("position_ids, seq_idx and cu_seq_lens_q/k mean different documents")
    return meant[0].long() if meant else None


def separate_documents(
    at: Columns, ended_BT: Tensor, cache: Cache | None, *, restart: bool
) -> None:
    """Limit the attention of each new token to its own document, by changing `at`.

    Args:
        at: The columns and positions of the new tokens. This object is changed.
        ended_BT: Whether each new token is an end-of-document token.
        cache: The cache of the tokens before the new tokens, or None.
        restart: Whether positions restart at 0 with each document.
    """
    at.ended_BT = ended_BS = ended_BT
    keys_BKSE: Any = getattr(cache.layers[0], "keys", None) if cache and cache.layers else None
    if keys_BKSE is not None and keys_BKSE.numel():
        # `Attention` stores `ended_BT` as the last number of each key.
        cached_BS = keys_BKSE[:, 0, :, -1].to(ended_BT.device) > 0
        if at.offset is None:
            ended_BS = cached_BS.index_copy(1, at.columns_T, ended_BT)
        else:
            ended_BS = torch.cat((cached_BS[:, : at.offset], ended_BT), dim=1)
    starts_BT = document_starts(ended_BS).index_select(1, at.columns_T)
    if restart:
        at.positions_BT = at.positions_BT.minimum(at.columns_T - starts_BT)
    at.first_BT = starts_BT if at.first_BT is None else starts_BT.maximum(at.first_BT)
