"""Call attention from code outside of this project, and check the inputs for common mistakes.

The model calls `AttentionFn`, which checks shapes and dtypes once. `attend` also checks values. On
a CPU, each call checks the document starts. The first call with an embedding checks the embedding's
formula and theta. Under `torch.compile`, only the formula is checked, with initial values of theta.

Legend: see `choice`.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import AttentionError, check_qkv, check_terms
from megatron.attention.call import Call
from megatron.attention.choice import computed, conditions, name_of_choice, named
from megatron.attention.contained import has_values
from megatron.attention.formula_check import check_embedding, check_initial_formulas
from megatron.positional import PositionalEmbedding
from megatron.positional.hidden_layer import is_transformed
from megatron.suggest import did_you_mean

DEBUG = "KERPLE_DEBUG"
"""The environment variable with which document starts are also checked on GPUs."""
HERE = {
    "attn_mask": "a bias is a formula of the distance (pos), see window and starts_BS",
    "score_mod": "a bias is a formula of the distance, the fourth argument (pos)",
    "block_mask": "write window=, or starts_BS= for documents",
    "is_causal": "it is always causal, so leave this out",
    "enable_gqa": "k and v may have fewer heads than q, so leave this out",
    "window_size": "write window=W - 1 for a window of W tokens",
    "softmax_scale": "write scale=",
}
"""What to write for arguments of SDPA, `flex_attention` and `flash_attn_func`."""
# As `torch.compiler.disable`, which would import the compiler now. This does so when it is called.
_outside_of_graphs = torch._disable_dynamo(computed)  # pyright: ignore[reportPrivateImportUsage]


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    query_offset: int | None = None,
    window: int | None = None,
    starts_BS: Tensor | None = None,
    positions_BT: Tensor | None = None,
    decay_BHS: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **unknown: Never,
) -> Any:
    """Return causal attention [batch, heads, queries, head size of v] in q's dtype.

    `Call` describes the arguments that are not listed here. If the embedding is rotary, `attend`
    rotates all dimensions of q and k, with the base 10000. Under autocast, q, k and v may have
    different dtypes.

    Args:
        v_BKSE: The values. Their head size may differ from that of q and k.
        scale: The number that multiplies the query-key products. None means 1/sqrt(head size).
        query_offset: The position of the first query. None requires equally many queries and keys.
        starts_BS: The position of the first token of each token's document; see `starts_from_ids`.
        backend: The name of the backend, as in the config key `attention_backend`.
        return_lse: Whether to return (output, lse). lse [batch, heads, queries] is the log-sum-exp
            of each softmax. lse is differentiable, and its dtype is at least fp32.

    Raises:
        AttentionError: The inputs do not fit together, or the backend does not support them.
        TypeError: An argument is unknown. For arguments of similar functions of other libraries,
            the error message says what to write instead.
    """
    _check_kinds(pos, unknown)
    q_BHTE, k_BKSE, v_BKSE = _of_one_dtype(q_BHTE, k_BKSE, v_BKSE)
    size, value_size = q_BHTE.shape[-1], v_BKSE.shape[-1]
    v_BKSE = _padded(v_BKSE, size)
    check_qkv(q_BHTE, k_BKSE, v_BKSE[..., :size])
    call = Call(
        q_BHTE, k_BKSE, v_BKSE, pos, theta_HN,
        scale=size**-0.5 if scale is None else scale, dropout_p=dropout_p,
        query_offset=_offset(query_offset, q_BHTE.shape[2], k_BKSE.shape[2]), window=window,
        decay_BHS=decay_BHS, starts_BS=starts_BS, positions_BT=positions_BT, return_lse=return_lse,
    )  # fmt: skip
    check_terms(call)
    q_BHTE, k_BKSE = (_padded(x, value_size) for x in _rotated(call))
    call = replace(call, q_BHTE=q_BHTE, k_BKSE=k_BKSE)
    name = name_of_choice(pos, _serving_transforms(backend), **conditions(call))
    _check_values(call)
    breaks = return_lse and torch.compiler.is_compiling()
    found = (_outside_of_graphs if breaks else computed)(named(name, pos), call)
    if value_size >= size:
        return found
    return (found[0][..., :value_size], found[1]) if return_lse else found[..., :value_size]


def _check_kinds(pos: Any, unknown: Iterable[str]) -> None:
    """Check that `pos` is a positional embedding, and that `unknown` is empty.

    `unknown` contains the names of the caller's arguments that `attend` does not have.
    """
    for name in unknown:
        near = did_you_mean(name, attend.__kwdefaults__ or ()) + "see help(attend)"
        raise TypeError(f"attend has no argument {name}: {HERE.get(name, near)}")
    if not isinstance(pos, PositionalEmbedding):
        made = isinstance(pos, type) and issubclass(pos, PositionalEmbedding)
        what = f"the class {pos.__name__}: write {pos.__name__}()" if made else type(pos).__name__
        raise AttentionError(
            "the fourth argument of attend(q, k, v, pos, theta) must be a positional embedding, "
            f"such as load('kerple_log'), not {what}"
        )


def _padded(x: Tensor, size: int) -> Tensor:
    """Pad the last dimension of a tensor with zeros to at least `size` entries."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _of_one_dtype(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v. If their dtypes differ under autocast, cast them to autocast's dtype.

    Raises:
        AttentionError: One of q, k and v is a nested tensor.
    """
    if any(x.is_nested for x in qkv):
        raise AttentionError(
            "q, k and v must not be nested tensors; pack the sequences one after another into one "
            "row, and give starts_BS=starts_from_ids(...)"
        )
    device = qkv[0].device.type
    if len({x.dtype for x in qkv}) > 1 and torch.is_autocast_enabled(device):
        return tuple(x.to(torch.get_autocast_dtype(device)) for x in qkv)
    return qkv


def _offset(query_offset: int | None, queries: int, keys: int) -> int:
    """Return the position of the first query. If `query_offset` is None, the position is 0.

    Raises:
        AttentionError: `query_offset` is None, but the numbers of queries and keys differ.
    """
    if query_offset is not None:
        return query_offset
    if queries > keys:
        raise AttentionError(f"{queries} queries, but only {keys} keys: each query needs its own")
    if queries != keys:
        raise AttentionError(
            f"{queries} queries and {keys} keys: write query_offset={keys - queries} if the last "
            "query is at the last key, as with a cache of keys (flash_attn_func aligns so), or "
            "query_offset=0 if the first query is at the first key (so does is_causal of "
            "scaled_dot_product_attention)"
        )
    return 0


def _rotated(call: Call) -> tuple[Tensor, Tensor]:
    """Return q and k, rotated by their positions if the embedding is rotary.

    Raises:
        AttentionError: The call has positions that the embedding does not use, or a rotary
            embedding needs positions of keys that the call does not have.
    """
    pos, first = call.pos, call.query_offset
    queries, keys = call.q_BHTE.shape[2], call.k_BKSE.shape[2]
    if not pos.has("rotary"):
        if not (call.positions_BT is None or pos.has("temperature") or pos.reads_position):
            raise AttentionError(
                f"{pos.name} does not read positions_BT, because distances follow from the order "
                "of the tokens: leave positions_BT out"
            )
        return call.q_BHTE, call.k_BKSE
    key_positions = torch.arange(keys, device=call.q_BHTE.device)[None]
    positions_BT = call.positions_BT
    if positions_BT is None:
        positions_BT = key_positions[:, first : first + queries]
    elif queries == keys:
        key_positions = positions_BT
    else:
        raise AttentionError(
            f"{pos.name}: positions_BT gives no positions of keys; rotate q and k by pos.turn, and "
            "give attend an embedding without rotary"
        )
    turn = partial(pos.turn, rotary_ndims=None, base=1e4)
    return turn(call.q_BHTE, positions_BT), turn(call.k_BKSE, key_positions)


def _serving_transforms(backend: str) -> str:
    """Return the name of a backend that works inside transforms of torch.func, such as `vmap`.

    If this code runs inside a transform, "auto" becomes "eager". If not, or under `torch.compile`,
    the result is `backend`.

    Raises:
        AttentionError: This code runs inside a transform, and `backend` is neither "auto" nor
            "eager".
    """
    if torch.compiler.is_compiling() or backend == "eager" or not is_transformed():
        return backend
    if backend != "auto":
        raise AttentionError(f"{backend} does not work in torch.func; use eager, or auto")
    return "eager"


def _check_values(call: Call) -> None:
    """Check the values of an attention call's inputs where reading them is possible and cheap."""
    if torch.compiler.is_compiling():
        check_initial_formulas(call.pos, index(call.q_BHTE.shape[1]))
    if not has_values(call.q_BHTE):
        return
    if call.starts_BS is not None and (call.q_BHTE.device.type == "cpu" or os.environ.get(DEBUG)):
        _check_starts(call.starts_BS)
    # Only at the first use of an embedding.
    check_embedding(call.pos, call.theta)


def _check_starts(starts_BS: Tensor) -> None:
    """Check that `starts_BS` has the position of the first token of each token's document.

    Raises:
        AttentionError: A number in `starts_BS` is not such a position.
    """
    position_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    later_BS = (starts_BS > position_S) | (starts_BS < 0)
    own_BS = starts_BS.gather(1, starts_BS.long().clamp(0, len(position_S) - 1))
    wrong_BS = later_BS | (own_BS != starts_BS)  # a start is the first token of its own document
    wrong_BS[:, 1:] |= starts_BS[:, 1:] < starts_BS[:, :-1]
    if wrong_BS.any():
        row, token = wrong_BS.nonzero()[0].tolist()
        raise AttentionError(
            f"starts_BS[{row}, {token}] is {int(starts_BS[row, token])}, which is not the position "
            "of the first token of a document that holds this token; if these numbers are ids of "
            "documents, write starts_BS=starts_from_ids(ids)"
        )
