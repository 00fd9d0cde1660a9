"""The choice of an attention backend: looked up once, at start-up.

Every backend computes, for query position i = query_offset + row and key position j <= i,

    out_i = sum_j softmax_j(scale (q_i . k_j) w_h(i - j) + b_h(i - j)) v_j

A request that a backend does not serve (an embedding, dtype, device, training, dropout) is refused,
with the names of the backends that serve it. No backend falls back to another one silently.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, N columns
of theta.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.attention import blocked, eager, flex, fused, published_numerics, sdpa
from megatron.attention.backend import Backend, Call, Request
from megatron.positional import PositionalEmbedding
from megatron.suggest import did_you_mean

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (eager, blocked, fused, sdpa, flex)
}
AUTO = {"cuda": ("fused", "blocked", "eager"), "cpu": ("blocked", "eager")}
"""What `auto` takes on a device: the first backend that serves the request."""


class AttentionError(ValueError):
    """An unavailable backend or invalid inputs; the message names what to use instead."""


class AttentionFn:
    """A chosen backend, to be called.

    Attributes:
        backend: the chosen one.
        reason: why it was chosen, for the log.
        request: what it was chosen for. Another dtype or device, gradients or dropout that the
            backend does not serve are an error in the first call that has them.
    """

    def __init__(self, backend: Backend, reason: str, request: Request):
        self.backend, self.reason, self.request = backend, reason, request
        self._checked_layout: tuple | None = None

    @property
    def name(self) -> str:
        """The backend's name, as in `attention_backend`."""
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
    ) -> Tensor:
        """Attention output [B, H, T, E] in q's dtype; differentiable in q, k, v and theta.

        Scores, softmax and sums are in fp32 (fp64 for fp64 inputs), also under autocast. Rotary and
        input embeddings are applied by the model: they add nothing here.

        Args:
            theta_HN: the kernel's parameters for these heads; needed for distance kernels only.
            scale: factor of the products of query and key, usually 1/sqrt(E).
            dropout_p: probability of dropping a softmax weight; draws from the default generator
                of q's device.
            query_offset: position of the first query; keys are at 0 ... S-1, and every query's own
                key must be among them (query_offset + T <= S). Later keys are never seen, whatever
                they hold: a cache need not be filled.

        Raises:
            AttentionError: the inputs do not match, or the backend does not serve them.
        """
        return self.run(Call(q_BHTE, k_BKSE, v_BKSE, pos, theta_HN, scale, dropout_p, query_offset))

    def run(self, call: Call) -> Tensor:
        """Check the call if its layout is new, then compute it."""
        self._check_layout(call)
        k_BKSE, v_BKSE = call.k_BKSE, call.v_BKSE
        group = call.q_BHTE.shape[1] // k_BKSE.shape[1]
        seen = call.query_offset + call.q_BHTE.shape[2]
        if seen < k_BKSE.shape[2]:  # later keys may hold anything, even NaN, and NaN times 0 is NaN
            k_BKSE, v_BKSE = k_BKSE[:, :, :seen], v_BKSE[:, :, :seen]
        if group > 1 and not self.backend.grouped:
            k_BKSE, v_BKSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
        if k_BKSE is not call.k_BKSE:
            call = replace(call, k_BKSE=k_BKSE, v_BKSE=v_BKSE)
        with torch.autocast(call.q_BHTE.device.type, enabled=False):
            return self.backend.function(call)

    def _check_layout(self, call: Call) -> None:
        """Check a call unless its layout is the previous one's, as in the layers of a step."""
        if torch.compiler.is_compiling():  # traced once per layout: the graph contains no check
            self._check(call)
        elif (layout := call.layout) != self._checked_layout:
            self._check(call)
            self._checked_layout = layout

    def _check(self, call: Call) -> None:
        check(call)
        request = replace(
            self.request,
            device_type=call.q_BHTE.device.type,
            dtype=call.q_BHTE.dtype,
            training=self.request.training or call.wants_gradients,
            dropout=self.request.dropout or call.dropout_p > 0.0,
            head_size=call.q_BHTE.shape[-1],
        )
        if request != self.request and (why := refusal(self.backend, request)):
            raise refused(self.name, why, request)


def choose(
    backend: str,
    pos: PositionalEmbedding,
    *,
    device_type: str,
    dtype: torch.dtype,
    training: bool = True,
    dropout: bool = False,
    head_size: int | None = None,
) -> AttentionFn:
    """Look up a backend for a request; see `megatron.attention.backend.Request`.

    Raises:
        AttentionError: the backend is unknown, or does not serve this request; the message names
            those that do.
    """
    request = Request(pos, device_type, dtype, training, dropout, head_size)
    if backend == "auto":
        return first_that_serves(request)
    if backend not in BACKENDS:
        offered = ["auto", *BACKENDS]
        hint = did_you_mean(backend, offered)
        raise AttentionError(
            f"no attention_backend {backend!r}; {hint}There are: {', '.join(offered)}"
        )
    chosen = named(backend, request)
    if why := refusal(chosen, request):
        raise refused(backend, why, request)
    remark = chosen.remark(request)
    return AttentionFn(chosen, ", ".join(filter(None, ("as configured", remark))), request)


def first_that_serves(request: Request) -> AttentionFn:
    """The choice of `auto`."""
    reasons = [f"auto: for {request.pos.name} in {request.dtype} on {request.device_type}"]
    for name in AUTO.get(request.device_type, AUTO["cpu"]):
        backend = named(name, request)
        why = refusal(backend, request)
        if why is None:
            remark = backend.remark(request)
            reason = "; ".join(reasons) + (f": {remark}" if remark else "")
            return AttentionFn(backend, reason, request)
        reasons.append(f"{name} {why}")
    raise AssertionError("eager, the last of each list, serves every request")


def named(name: str, request: Request) -> Backend:
    """The backend of this name; with published numerics, `eager` means `published_numerics`."""
    if name == "eager" and request.pos.numerics.published:
        return published_numerics.BACKEND
    return BACKENDS[name]


def refusal(backend: Backend, request: Request) -> str | None:
    """Why the backend does not serve this request, or None."""
    sixteen_bit = request.dtype in (torch.bfloat16, torch.float16)
    if request.pos.numerics.published and sixteen_bit and backend is not published_numerics.BACKEND:
        return "computes in fp32, so it cannot round as published_numerics asks"
    return backend.refusal(request)


def refused(backend: str, why: str, request: Request) -> AttentionError:
    others = [name for name in BACKENDS if refusal(named(name, request), request) is None]
    serve = ", ".join(["auto", *others])
    return AttentionError(
        f"attention_backend {backend} {why}. For pos_emb {request.pos.name} in {request.dtype} on "
        f"{request.device_type} use {serve}"
    )


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    query_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Choose and call at once, for tests, tools and notebooks; see `AttentionFn`."""
    call = Call(q_BHTE, k_BKSE, v_BKSE, pos, theta_HN, scale, dropout_p, query_offset)
    chosen = choose(
        backend,
        pos,
        device_type=q_BHTE.device.type,
        dtype=q_BHTE.dtype,
        training=call.wants_gradients,
        dropout=dropout_p > 0.0,
        head_size=q_BHTE.shape[-1],
    )
    return chosen.run(call)


def check(call: Call) -> None:
    """Refuse inputs that would give wrong numbers, or an obscure error, later.

    Raises:
        AttentionError: shapes, dtypes, devices or numbers do not fit.
    """
    q_BHTE, k_BKSE, v_BKSE, theta_HN = call.q_BHTE, call.k_BKSE, call.v_BKSE, call.theta_HN
    batch, heads, queries, size = q_BHTE.shape
    key_heads, keys = k_BKSE.shape[1:3]
    if k_BKSE.shape != v_BKSE.shape or k_BKSE.shape != (batch, key_heads, keys, size):
        raise AttentionError(
            f"q {list(q_BHTE.shape)}, k {list(k_BKSE.shape)} and v {list(v_BKSE.shape)} must agree "
            "in batch and head size, and k and v in heads and length"
        )
    if key_heads == 0 or heads % key_heads:
        raise AttentionError(f"{key_heads} heads of k and v must divide the {heads} heads of q")
    if not q_BHTE.dtype == k_BKSE.dtype == v_BKSE.dtype:
        raise AttentionError(
            f"q, k and v must have one dtype, not {q_BHTE.dtype}, {k_BKSE.dtype}, {v_BKSE.dtype}"
        )
    if theta_HN is not None and theta_HN.device != q_BHTE.device:
        raise AttentionError(f"theta is on {theta_HN.device}, but q on {q_BHTE.device}")
    if not q_BHTE.device == k_BKSE.device == v_BKSE.device:
        raise AttentionError(
            f"q, k and v must be on one device, not {q_BHTE.device}, {k_BKSE.device}, "
            f"{v_BKSE.device}"
        )
    if not call.scale > 0.0:
        raise AttentionError(f"scale must be above 0, not {call.scale}")
    first = call.query_offset
    if first < 0 or first + queries > keys:
        raise AttentionError(
            f"queries at positions {first} ... {first + queries - 1} need their own keys, but "
            f"there are {keys}: query_offset + T <= S must hold"
        )
    if not 0.0 <= call.dropout_p < 1.0:
        raise AttentionError(f"dropout_p must lie in [0, 1), not {call.dropout_p}")
    if call.has_kernel:
        expected = (heads, len(call.pos.parameters))
        if theta_HN is None or tuple(theta_HN.shape) != expected:
            got = "none" if theta_HN is None else str(list(theta_HN.shape))
            raise AttentionError(f"{call.pos.name} needs theta {list(expected)}, got {got}")
