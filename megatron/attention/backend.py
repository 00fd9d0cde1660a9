"""Define attention backends, and check the inputs of a call.

A backend computes attention for a `Call`. A `Request` describes the calls that a model makes. A
backend may refuse a request.

Legend: see `choice`.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megatron.attention.call import Call
from megatron.errors import UserError
from megatron.positional import PositionalEmbedding

F = TypeVar("F", bound=Callable)


class AttentionError(UserError, ValueError):
    """An attention backend is not available, or its inputs are invalid."""


@dataclass(frozen=True)
class Request:
    """The requirements of a model for its attention backend.

    Attributes:
        pos: The positional embedding.
        device_type: "cpu" or "cuda".
        dtype: The dtype of q, k and v.
        training: Whether gradients are needed.
        dropout: Whether dropout is applied to the softmax weights.
        head_size: The head size, or None if it is not known.
        masked: Whether documents or a window hide some keys from later queries.
        decays: Whether a forget gate lowers the logits.
    """

    pos: PositionalEmbedding
    device_type: str
    dtype: torch.dtype
    training: bool = True
    dropout: bool = False
    head_size: int | None = None
    masked: bool = False
    decays: bool = False


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: The name, as in the config key `attention_backend`.
        function: The function that computes attention. It returns the output, or (output, lse) if
            the call asks for lse. lse is the log-sum-exp of each softmax [batch, heads, queries],
            in at least fp32.
        refusal: A function that returns why the backend does not support a request. It returns None
            if the backend supports the request.
        remark: A function that gets a request, and returns a text about it for the log. The text
            may be empty.
        grouped: Whether k and v may have fewer heads than q.
        gives_lse: Whether `function` can return lse.
        tempers: A function that returns whether the backend multiplies the scores by the
            embedding's temperature. If not, the caller multiplies q by the temperature.
    """

    name: str
    function: Callable[[Call], Any]
    refusal: Callable[[Request], str | None] = lambda request: None
    remark: Callable[[Request], str] = lambda request: ""
    grouped: bool = False
    gives_lse: bool = False
    tempers: Callable[[PositionalEmbedding], bool] = lambda pos: False


def wants_gradients(call: Call) -> bool:
    """Return whether any input of an attention call needs a gradient."""
    inputs = (call.q_BHTE, call.k_BKSE, call.v_BKSE, call.theta_HN, call.decay_BHS, call.sink_H)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def weighted(pos: PositionalEmbedding) -> bool:
    """Return whether the embedding has a factor that multiplies the query-key products."""
    one_HN = torch.ones(1, len(pos.parameters))
    return pos.has("distance") and pos.weight(one_HN, torch.arange(2)) is not None


def constant(function: F) -> F:
    """Decorate a function so that `torch.compile` treats the function's result as a constant.

    The function runs once, at compile time. The compiled graph is valid only as long as the
    function's first argument is the same object as at compile time.
    """

    # by address, because torch 2.11 accepts only numbers, texts and the like
    def at(address: int, *rest: Any, **options: Any) -> Any:
        return function(ctypes.cast(address, ctypes.py_object).value, *rest, **options)

    # as `torch.compiler.assume_constant_result`, which takes a second to import the compiler
    at._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    @wraps(function)
    def result(first: object, *rest: Any, **options: Any) -> Any:
        return at(id(first), *rest, **options)

    return cast(F, result)


def check_terms(call: Call) -> None:
    """Check all inputs of an attention call, except the shapes and dtypes of q, k and v.

    Raises:
        AttentionError: A shape, dtype or device does not fit the other inputs, or a number is out
            of range.
    """
    q_BHTE, k_BKSE, v_BKSE, theta_HN = call.q_BHTE, call.k_BKSE, call.v_BKSE, call.theta_HN
    batch, heads, queries, _ = q_BHTE.shape
    keys = k_BKSE.shape[2]
    for name, x in (("theta", theta_HN), ("k", k_BKSE), ("v", v_BKSE)):
        if x is not None and x.device != q_BHTE.device:
            raise AttentionError(f"{name} is on {x.device}, but q on {q_BHTE.device}")
    if not call.scale > 0.0:
        raise AttentionError(f"scale must be above 0, not {call.scale}")
    first = call.query_offset
    if not isinstance(first, int):
        raise AttentionError(
            f"query_offset must be one whole number for all sequences, not {type(first).__name__}"
        )
    if first < 0 or first + queries > keys:
        raise AttentionError(
            f"queries at positions {first} ... {first + queries - 1} need their own keys, but "
            f"there are {keys}: query_offset + T <= S must hold"
        )
    if not 0.0 <= call.dropout_p < 1.0:
        raise AttentionError(f"dropout_p must lie in [0, 1), not {call.dropout_p}")
    for name, x, shape in (
        ("decay_BHS", call.decay_BHS, (batch, heads, keys)),
        ("starts_BS", call.starts_BS, (batch, keys)),
        ("positions_BT", call.positions_BT, (batch, queries)),
    ):
        if x is not None and (tuple(x.shape) != shape or x.device != q_BHTE.device):
            needed = f"{list(shape)} on {q_BHTE.device}"
            raise AttentionError(f"{name} must be {needed}, not {list(x.shape)} on {x.device}")
        if x is not None and name == "starts_BS" and x.dtype not in (torch.int32, torch.int64):
            raise AttentionError(f"{name} must be int32 or int64, not {x.dtype}")
    if call.pos.has("gate") and call.decay_BHS is None:
        raise AttentionError(f"{call.pos.name} needs decay_BHS: write decay_BHS=pos.decay(gate)")
    whole = isinstance(call.window, int) and not isinstance(call.window, bool)
    if call.window is not None and not (whole and call.window >= 0):
        raise AttentionError(f"window must be a whole number, 0 or more, not {call.window}")
    if call.has_kernel or call.pos.parameters:
        columns = call.pos.parameters
        expected = (heads, len(columns))
        if columns if theta_HN is None else tuple(theta_HN.shape) != expected:
            got = "none" if theta_HN is None else str(list(theta_HN.shape))
            hint = "" if columns else "; declare parameters = (ThetaParameter('a', low=0.0), ...)"
            raise AttentionError(f"{call.pos.name} needs theta {list(expected)}, got {got}{hint}")


def check_qkv(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> None:
    """Check that the shapes and dtypes of q, k and v fit together.

    Raises:
        AttentionError: The shapes or dtypes do not fit together.
    """
    if any(x.dim() != 4 for x in (q_BHTE, k_BKSE, v_BKSE)) or 0 in q_BHTE.shape[1:]:
        raise AttentionError(
            f"q {list(q_BHTE.shape)}, k {list(k_BKSE.shape)} and v {list(v_BKSE.shape)} must be "
            "[batch, heads, positions, head size], and only the batch may be 0"
        )
    if not q_BHTE.is_floating_point():
        raise AttentionError(f"q, k and v must be floating-point numbers, not {q_BHTE.dtype}")
    batch, heads, _, size = q_BHTE.shape
    key_heads, keys = k_BKSE.shape[1:3]
    if k_BKSE.shape != v_BKSE.shape or k_BKSE.shape != (batch, key_heads, keys, size):
        raise AttentionError(
            f"q {list(q_BHTE.shape)}, k {list(k_BKSE.shape)} and v {list(v_BKSE.shape)} must agree "
            "in batch and head size, and k and v in heads and length"
        )
    if key_heads == 0 or heads % key_heads:
        raise AttentionError(f"{key_heads} heads of k and v must divide the {heads} heads of q")
    if not q_BHTE.dtype == k_BKSE.dtype == v_BKSE.dtype:
        found = f"{q_BHTE.dtype}, {k_BKSE.dtype}, {v_BKSE.dtype}"
        raise AttentionError(f"q, k and v must have one dtype, not {found}")
