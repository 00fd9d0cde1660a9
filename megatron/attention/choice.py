"""Choose an attention backend, once at start-up.

Every backend computes, for query position i = query_offset + row and key position j <= i,

    out_i = sum_j softmax_j(t_h(i) scale (q_i . k_j) w_h(i - j) + b_h(i - j, i) + c_i - c_j) v_j

w and b are the factor and the bias of the distance kernel, which depend on the query-key distance.
(Some biases also depend on the query's position i in its document.) t is the temperature, c the
decay. Documents and a window limit the keys that a query sees. A sink adds a null key to the
softmax. Each of these terms may be absent.

A request is a combination of embedding, dtype, device, training, dropout and so on. If the chosen
backend does not serve it, an error names others that do. No backend falls back to another silently.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, N columns
of theta, the distance kernel's parameters.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from megatron.attention import blocked, flex, fused, published_numerics, sdpa
from megatron.attention.backend import (
    AttentionError,
    Backend,
    Request,
    check,
    constant,
    wants_gradients,
)
from megatron.attention.call import Call, lowered
from megatron.attention.contained import contained
from megatron.attention.eager import eager
from megatron.positional import PositionalEmbedding
from megatron.suggest import did_you_mean

BACKENDS = {"eager": Backend("eager", eager, gives_lse=True)}
BACKENDS |= {module.BACKEND.name: module.BACKEND for module in (blocked, fused, sdpa, flex)}
AUTO = {"cuda": ("fused", "blocked", "eager"), "cpu": ("blocked", "eager")}
"""The backends that `auto` tries on each device, in order, until one serves the request."""


class AttentionFn:
    """A function that computes attention with a chosen backend.

    Attributes:
        backend: The chosen backend.
        reason: Why the backend was chosen, for the log.
        request: The requirements for which the backend was chosen. A call may differ from them if
            the backend supports it.
    """

    def __init__(self, backend: Backend, reason: str, request: Request):
        self.backend, self.reason, self.request = backend, reason, request
        self._checked_layout: tuple | None = None

    @property
    def name(self) -> str:
        """The name of the backend, as in the config key `attention_backend`."""
        return self.backend.name

    def __call__(
        self,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        pos: PositionalEmbedding,
        theta_HN: Tensor | None = None,
        *,
        scale: float,
        dropout_p: float = 0.0,
        query_offset: int = 0,
        decay_BHS: Tensor | None = None,
        starts_BS: Tensor | None = None,
        window: int | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output in q's dtype and shape [batch, heads, queries, head size].

        The output is differentiable in q, k, v, theta and the decay. Computations are in fp32 (fp64
        for fp64 inputs), also under autocast. Rotary embeddings must be applied before this call.

        Args:
            q_BHTE: The queries [batch, heads, queries, head size].
            k_BKSE, v_BKSE: The keys and values [batch, key heads, keys, head size]. The number of
                key heads must divide the number of heads.
            pos: The positional embedding.
            theta_HN: The parameters of the positional embedding, one row for each head of q. Needed
                only if `pos` has parameters.
            scale: The number that multiplies the query-key products, usually 1/sqrt(head size).
            dropout_p: The probability of dropping a softmax weight. Random numbers are drawn from
                the default generator of q's device.
            query_offset: The position of the first query. The first key has the position 0. Keys
                after the last query are ignored.
            decay_BHS: The sum c of all log-decays up to each position [batch, heads, keys], as of a
                forget gate. c_i - c_j is added to the logit of query i and key j. Long sequences
                need fp64.
            starts_BS: The position of the first token of each token's document [batch, keys]. A
                query sees only keys of its own document.
            window: The largest distance at which a query sees a key.
            positions_BT: The position of each query [batch, queries]. None means that biases use
                the position in the document, and temperatures the position in the sequence.

        Raises:
            AttentionError: The inputs do not fit together, or the backend does not support them.
        """
        call = Call(
            q_BHTE, k_BKSE, v_BKSE, pos, theta_HN, scale=scale, dropout_p=dropout_p,
            query_offset=query_offset, decay_BHS=decay_BHS, starts_BS=starts_BS, window=window,
            positions_BT=positions_BT,
        )  # fmt: skip
        # Unused entries of a cache of keys may contain anything.
        self._check_layout(call)
        return computed(self.backend, call)

    def _check_layout(self, call: Call) -> None:
        """Check an attention call, unless the previous call had the same shapes and dtypes."""
        # All layers of a training step have the same layout, so only their first call is checked.
        if torch.compiler.is_compiling():  # runs once per layout; the graph contains no check
            self._check(call)
        elif (layout := _layout(call)) != self._checked_layout:
            self._check(call)
            self._checked_layout = layout

    def _check(self, call: Call) -> None:
        check(call)
        self._check_request(**conditions(call))

    @constant
    def _check_request(self, **conditions: Any) -> None:
        for name in ("training", "dropout", "masked", "decays"):
            conditions[name] = conditions[name] or getattr(self.request, name)
        request = replace(self.request, **conditions)
        if request != self.request and (why := refusal(self.backend, request)):
            raise refused(self.name, why, request)


def choose(backend: str, pos: PositionalEmbedding, **conditions: Any) -> AttentionFn:
    """Return an attention function that uses the backend with this name.

    Args:
        backend: The name of the backend. "auto" means the best backend for these conditions.
        pos: The positional embedding.
        conditions: Arguments of `Request`, such as the dtype.

    Raises:
        AttentionError: The backend is unknown, or does not support these conditions.
    """
    request = Request(pos, **conditions)
    if backend == "auto":
        return first_that_serves(request)
    if backend not in BACKENDS:
        offered = ["auto", *BACKENDS]
        hint = did_you_mean(backend, offered)
        raise AttentionError(
            f"no attention_backend {backend!r}; {hint}There are: {', '.join(offered)}"
        )
    chosen = named(backend, pos)
    if why := refusal(chosen, request):
        raise refused(backend, why, request)
    remark = chosen.remark(request)
    return AttentionFn(chosen, ", ".join(filter(None, ("as configured", remark))), request)


def first_that_serves(request: Request) -> AttentionFn:
    """Return an attention function that uses the best backend for a request."""
    reasons = [f"auto: {request.pos.name}, {request.dtype}, {request.device_type}"]
    for name in AUTO.get(request.device_type, AUTO["cpu"]):
        backend = named(name, request.pos)
        why = refusal(backend, request)
        if why is None:
            remark = backend.remark(request)
            reason = "; ".join(reasons) + (f": {remark}" if remark else "")
            return AttentionFn(backend, reason, request)
        reasons.append(f"{name} {why}")
    raise AssertionError("eager, the last of each list, serves every request")


def named(name: str, pos: PositionalEmbedding) -> Backend:
    """Return the backend with this name."""
    # The name `eager` has a second meaning for an embedding that rounds as the released KERPLE
    # code does (`PublishedNumerics`).
    if name == "eager" and pos.numerics.published:
        return published_numerics.BACKEND
    return BACKENDS[name]


def refusal(backend: Backend, request: Request) -> str | None:
    """Return why the backend does not support a request, or None if it does."""
    sixteen_bit = request.dtype in (torch.bfloat16, torch.float16)
    if request.pos.numerics.published and sixteen_bit and backend is not published_numerics.BACKEND:
        return "computes in fp32, so it cannot round as published_numerics asks"
    return backend.refusal(request)


def refused(backend: str, why: str, request: Request) -> AttentionError:
    others = [name for name in BACKENDS if refusal(named(name, request.pos), request) is None]
    serve = ", ".join(["auto", *others])
    return AttentionError(
        f"attention_backend {backend} {why}. For pos_emb {request.pos.name} in {request.dtype} on "
        f"{request.device_type} use {serve}"
    )


def _layout(call: Call) -> tuple:
    """Return the shapes, dtypes and other properties of a call that a check depends on."""
    tensors = (call.q_BHTE, call.k_BKSE, call.v_BKSE, call.theta_HN)
    tensors += (call.decay_BHS, call.starts_BS, call.positions_BT)
    shapes = (None if x is None else (x.shape, x.dtype, x.device) for x in tensors)
    numbers = (call.scale, call.dropout_p, call.query_offset, call.window)
    return *shapes, *numbers, call.pos, wants_gradients(call)


def conditions(call: Call) -> dict[str, Any]:
    """Return the properties of a call as keyword arguments of `choose`, such as its dtype."""
    drops = False  # the branch and `index` make numbers constant that torch.compile left open
    if call.dropout_p > 0.0:
        drops = True
    return {
        "device_type": call.q_BHTE.device.type,
        "dtype": call.q_BHTE.dtype,
        "training": wants_gradients(call),
        "dropout": drops,
        "head_size": index(call.q_BHTE.shape[-1]),
        "masked": call.masked,
        "decays": call.decay_BHS is not None,
    }


@constant
def name_of_choice(pos: PositionalEmbedding, backend: str, **conditions: Any) -> str:
    """Return the name of the backend that `choose` returns for the same arguments."""
    return choose(backend, pos, **conditions).name


def computed(backend: Backend, call: Call) -> Any:
    """Return the output of an attention call, without checking its inputs.

    Return (output, lse) if the call asks for it. lse is the log-sum-exp of each softmax.

    Raises:
        AttentionError: The call asks for lse, but the backend cannot return it.
    """
    device = call.q_BHTE.device.type
    if call.q_BHTE.shape[0] == 0:  # a kernel with nothing to do cannot be launched
        backend = BACKENDS["eager"]
    if call.return_lse and not backend.gives_lse:
        able = ", ".join(name for name, other in BACKENDS.items() if other.gives_lse)
        raise AttentionError(f"attention_backend {backend.name} returns no lse; use auto, {able}")

    def run(call: Call) -> Any:
        tempered = call.pos.has("temperature") and backend.tempers(call.pos)
        return backend.function(lowered(call, grouped=backend.grouped, tempered=tempered))

    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        return run(call) if backend is fused.BACKEND else contained(run, call)
