"""Call attention from code outside of this project, with checks of what such code gets wrong.

The model calls `AttentionFn`, which checks shapes and dtypes once. `attend` also looks at values:
document starts in each call on a CPU, and the formula and theta at the first call of an embedding.

Legend: see `choice`.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import AttentionError, check, check_qkv
from megatron.attention.call import Call
from megatron.attention.choice import computed, conditions, name_of_choice, named
from megatron.attention.formulas.trace import PROBES, parts_of
from megatron.positional import PositionalEmbedding

DEBUG = "KERPLE_DEBUG"
"""The environment variable with which document starts are also checked on GPUs."""
_CHECKED: set[PositionalEmbedding] = set()


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
) -> Tensor:
    """Return causal attention [batch, heads, queries, head size of v] in q's dtype.

    The arguments that are not listed here are those of `AttentionFn.__call__`. In contrast to that
    method, this function rotates q and k if `pos` has a rotary term, over the whole head size and
    with the base 10000. Under autocast, q, k and v may have different dtypes.

    Args:
        v_BKSE: The values. Their head size may differ from that of q and k.
        scale: The factor of the query-key products. If None, it is 1/sqrt(head size).
        query_offset: The position of the first query. It may be None if there are as many queries
            as keys.
        starts_BS: The position of the first token of each token's document; see `starts_from_ids`.
        backend: The name of the backend, as in the config key `attention_backend`.

    Raises:
        AttentionError: The inputs do not fit together, or the backend does not serve them.
    """
    if not isinstance(pos, PositionalEmbedding):
        raise AttentionError(
            f"the fourth argument must be a positional embedding, such as load('kerple_log'), "
            f"not {type(pos).__name__}: attend(q, k, v, pos, theta)"
        )
    q_BHTE, k_BKSE, v_BKSE = _of_one_dtype(q_BHTE, k_BKSE, v_BKSE)
    size, value_size = q_BHTE.shape[-1], v_BKSE.shape[-1]
    if value_size < size:
        v_BKSE = F.pad(v_BKSE, (0, size - value_size))
    check_qkv(q_BHTE, k_BKSE, v_BKSE[..., :size])
    if query_offset is None:
        query_offset = _only_alignment(q_BHTE.shape[2], k_BKSE.shape[2])
    if pos.has("rotary"):
        q_BHTE, k_BKSE = _rotated(pos, q_BHTE, k_BKSE, query_offset, positions_BT)
    if value_size > size:
        q_BHTE, k_BKSE = (F.pad(x, (0, value_size - size)) for x in (q_BHTE, k_BKSE))
    call = Call(
        q_BHTE, k_BKSE, v_BKSE, pos, theta_HN, scale=scale or size**-0.5, dropout_p=dropout_p,
        query_offset=query_offset, decay_BHS=decay_BHS, starts_BS=starts_BS, window=window,
        positions_BT=positions_BT,
    )  # fmt: skip
    name = name_of_choice(pos, _serving_transforms(backend), **conditions(call))
    check(call)
    if _has_values(call.q_BHTE):
        _check_values(call)
    out_BHTE = computed(named(name, pos), call)
    return out_BHTE[..., :value_size] if value_size < size else out_BHTE


def _of_one_dtype(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v. Under autocast, if they have different dtypes, cast them to autocast's.

    Raises:
        AttentionError: One is a nested tensor.
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


def _only_alignment(queries: int, keys: int) -> int:
    """Return 0, the position of the first query if there are as many queries as keys.

    Raises:
        AttentionError: There are fewer queries than keys, so their positions are not known.
    """
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


def _rotated(
    pos: PositionalEmbedding,
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    query_offset: int,
    positions_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return q and k, rotated by their positions."""
    queries, keys = q_BHTE.shape[2], k_BKSE.shape[2]
    key_positions = torch.arange(keys, device=q_BHTE.device)[None]
    if positions_BT is None:
        positions_BT = key_positions[:, query_offset : query_offset + queries]
    elif queries == keys:
        key_positions = positions_BT
    else:
        raise AttentionError(
            f"{pos.name}: positions_BT gives no positions of keys; rotate q and k by pos.turn, and "
            "give attend an embedding without rotary"
        )
    return pos.turn(q_BHTE, positions_BT, None, 1e4), pos.turn(k_BKSE, key_positions, None, 1e4)


def _has_values(x: Tensor) -> bool:
    """Return whether `x` holds real numbers: no compilation and no transformation is tracing it."""
    return not (torch.compiler.is_compiling() or _is_transformed() or x.is_meta)


def _is_transformed() -> bool:
    """Return whether torch.func is transforming the caller (`grad`, `vmap` and so on)."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None


def _serving_transforms(backend: str) -> str:
    """Return `backend`, or `eager` for `auto` while torch.func transforms the caller.

    Raises:
        AttentionError: The backend does not work under such a transformation.
    """
    if torch.compiler.is_compiling() or backend == "eager" or not _is_transformed():
        return backend
    if backend != "auto":
        raise AttentionError(f"{backend} does not work in torch.func; use eager, or auto")
    return "eager"


def _check_values(call: Call) -> None:
    """Check document starts and, at the first call of an embedding, its formula and theta."""
    on_cpu = call.q_BHTE.device.type == "cpu"
    if call.starts_BS is not None and (on_cpu or os.environ.get(DEBUG)):
        _check_starts(call.starts_BS)
    if call.theta_HN is not None and call.pos.parameters and call.pos not in _CHECKED:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            theta_HN = call.theta_HN.detach().cpu()
            _check_bounds(call.pos, theta_HN)
            if call.has_kernel:
                _check_formulas(call.pos, theta_HN.to(torch.float64, copy=True).requires_grad_())
        _CHECKED.add(call.pos)


def _check_starts(starts_BS: Tensor) -> None:
    """Raise `AttentionError` if `starts_BS` are not the first tokens of documents."""
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


def _check_bounds(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Raise `AttentionError` if a number in theta is not within its bounds."""
    for theta_H, parameter in zip(theta_HN.unbind(1), pos.parameters, strict=True):
        low, high = theta_H.new_tensor([parameter.low, parameter.high])
        outside_H = ~((theta_H >= low) & (theta_H <= high))
        if outside_H.any():
            head = int(outside_H.nonzero()[0])
            raise AttentionError(
                f"{pos.name}: theta's column {parameter.name} is {theta_H[head]:g} in head {head}, "
                f"but must lie in [{parameter.low:g}, {parameter.high:g}]; clamp theta after each "
                "step by megatron.positional.within_bounds(theta, pos.parameters)"
            )


def _check_formulas(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Raise `AttentionError` if bias or factor has a wrong shape, or a value or gradient is NaN."""
    d_1TS = torch.tensor(PROBES, dtype=torch.float64).view(1, 2, -1)
    i_1TS = d_1TS + 3
    for method, function in zip(("bias", "weight"), parts_of(pos), strict=True):
        value_HTS = function(theta_HN, d_1TS, i_1TS)
        if value_HTS is None:
            continue
        shape = (len(theta_HN), *d_1TS.shape)
        if tuple(value_HTS.shape) != shape:
            raise AttentionError(
                f"{pos.name}.{method} has returned the shape {list(value_HTS.shape)} for "
                f"{len(theta_HN)} heads and distances {list(d_1TS.shape)}, but must return "
                f"{list(shape)}: the heads first; self.columns(theta_HN, d) gives columns that fit"
            )
        for place, distance in enumerate(PROBES):
            found_H = value_HTS.flatten(1)[:, place]
            grad_HN = torch.zeros_like(theta_HN)
            if found_H.requires_grad:
                (grad_HN,) = torch.autograd.grad(found_H.sum(), theta_HN, retain_graph=True)
            for what, x in (("value", found_H), ("gradient with respect to theta", grad_HN)):
                if x.isnan().any():
                    raise AttentionError(
                        f"{pos.name}.{method}: its {what} at distance {distance:g} is NaN for "
                        f"theta {theta_HN[x.isnan().view(len(theta_HN), -1).any(1)][0].tolist()}; "
                        "torch.where does not help, because the branch that is not taken also has "
                        "a gradient: change the argument, such as sqrt(x + 1e-9)"
                    )
