"""Choose an attention backend, once at start-up.

Every backend computes, for query position i = query_offset + row and key position j <= i,

    out_i = sum_j softmax_j(t_h(i) scale (q_i . k_j) w_h(i - j) + b_h(i - j, i) + c_i - c_j) v_j

w and b are the factor and the bias of the distance kernel, which depend on the query-key distance.
(Some biases also depend on the query's position i in its document.) t is the temperature, and c is
the decay. Documents and a window limit the keys that a query sees. A sink adds a null key to the
softmax. Each of these terms may be absent.

A request is a combination of embedding, dtype, device, training, dropout and so on. If the chosen
backend does not support the request, the error message names backends that support it. No backend
silently falls back to another backend.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, N columns
of theta, the distance kernel's parameters.
"""

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
    check_qkv,
    check_terms,
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
        name: The name of the backend, as in the config key `attention_backend`.
        reason: Why the backend was chosen, for the log.
        request: The requirements for which the backend was chosen. A call may have other
            requirements if the backend supports them.
    """

    def __init__(self, backend: Backend, reason: str, request: Request):
        self.backend, self.reason, self.request = backend, reason, request
        self.name = backend.name
        self._checked_layout: tuple | None = None

    def __call__(self, call: Call) -> Tensor:
        """Return the attention output in q's dtype and shape [batch, heads, queries, head size].

        The output is differentiable in q, k, v, theta and the decay. Computations are in fp32 (fp64
        for fp64 inputs), also under autocast.

        Raises:
            AttentionError: The inputs do not fit together, or the backend does not support them.
        """
        # All layers of a training step have the same layout, so only their first call is checked.
        if torch.compiler.is_compiling():  # runs once per layout; the graph contains no check
            self._check(call)
        elif (layout := _layout(call)) != self._checked_layout:
            self._check(call)
            self._checked_layout = layout
        return computed(self.backend, call)

    def _check(self, call: Call) -> None:
        check_qkv(call.q_BHTE, call.k_BKSE, call.v_BKSE)
        check_terms(call)
        self._check_request(**conditions(call))

    @constant
    def _check_request(self, **conditions: Any) -> None:
        for name in ("training", "dropout", "masked", "decays"):
            conditions[name] = conditions[name] or getattr(self.request, name)
        request = replace(self.request, **conditions)
        if request != self.request and (why := refusal(self.backend, request)):
            raise refused(f"{self.name} {why}", request)


def choose(backend: str, pos: PositionalEmbedding, **conditions: Any) -> AttentionFn:
    """Return an attention function that uses the backend with this name.

    Args:
        backend: The name of the backend. "auto" means the best backend for these conditions.
        pos: The positional embedding.
        conditions: Arguments of `Request`, such as the dtype.

    Raises:
        AttentionError: The backend is unknown, or does not support these conditions.
    """
    request, tried = Request(pos, **conditions), (backend,)
    reasons = ["as configured"]
    if backend == "auto":
        tried = AUTO.get(request.device_type, AUTO["cpu"])
        reasons = [f"auto: {pos.name}, {request.dtype}, {request.device_type}"]
    elif backend not in BACKENDS:
        offered = ["auto", *BACKENDS]
        hint = did_you_mean(backend, offered) + f"There are: {', '.join(offered)}"
        raise AttentionError(f"no attention_backend {backend!r}; {hint}")
    for name in tried:
        chosen = named(name, pos)
        why = refusal(chosen, request)
        if why is None:
            remark = chosen.remark(request)
            reason = "; ".join(reasons) + (f": {remark}" if remark else "")
            return AttentionFn(chosen, reason, request)
        reasons.append(f"{name} {why}")
    raise refused(reasons[-1], request)


def named(name: str, pos: PositionalEmbedding) -> Backend:
    """Return the backend with this name.

    The name `eager` stands for two backends. If `pos` rounds as the released KERPLE code does
    (`PublishedNumerics`), the name means the backend of the module `published_numerics`. Otherwise
    the name means the backend of the module `eager`.
    """
    if name == "eager" and pos.numerics.published:
        return published_numerics.BACKEND
    return BACKENDS[name]


def refusal(backend: Backend, request: Request) -> str | None:
    """Return why the backend does not support a request, or None if the backend supports it."""
    sixteen_bit = request.dtype in (torch.bfloat16, torch.float16)
    if request.pos.numerics.published and sixteen_bit and backend is not published_numerics.BACKEND:
        return "computes in fp32, so it cannot round as published_numerics asks"
    return backend.refusal(request)


def refused(why: str, request: Request) -> AttentionError:
    others = [name for name in BACKENDS if refusal(named(name, request.pos), request) is None]
    serve = ", ".join(["auto", *others])
    return AttentionError(
        f"attention_backend {why}. For pos_emb {request.pos.name} in {request.dtype} on "
        f"{request.device_type} use {serve}"
    )


def _layout(call: Call) -> tuple:
    """Return the properties of a call that decide whether the call is valid, such as shapes."""
    inputs = vars(call).values()
    shapes = ((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in inputs)
    return *shapes, wants_gradients(call)


def conditions(call: Call) -> dict[str, Any]:
    """Return the properties of a call, such as its dtype, as keyword arguments of `choose`."""
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
    """Return the name of the backend that `choose` selects for the same arguments."""
    return choose(backend, pos, **conditions).name


def computed(backend: Backend, call: Call) -> Any:
    """Return the output of an attention call, without checking its inputs.

    Return (output, lse) if the call asks for lse. lse is the log-sum-exp of each softmax.

    Raises:
        AttentionError: The call asks for lse, but the backend cannot return it.
    """
    device = call.q_BHTE.device.type
    # For one new token, `flex` would compile at each length. With no text, nothing can be launched.
    alone = backend is flex.BACKEND and call.q_BHTE.shape[2] == 1 and not wants_gradients(call)
    if call.q_BHTE.shape[0] == 0 or alone:
        backend = BACKENDS["eager"]
    if call.return_lse and not backend.gives_lse:
        able = ", ".join(name for name, other in BACKENDS.items() if other.gives_lse)
        raise AttentionError(f"attention_backend {backend.name} returns no lse; use auto, {able}")

    def run(call: Call) -> Any:
        tempered = call.pos.has("temperature") and backend.tempers(call.pos)
        return backend.function(lowered(call, grouped=backend.grouped, tempered=tempered))

    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        return run(call) if backend is fused.BACKEND else contained(run, call)
