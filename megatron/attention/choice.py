"""The choice of an attention backend: looked up once, at start-up, never guessed later.

Every backend computes, for query position i = query_offset + row and key position j <= i,

    out_i = sum_j softmax_j(scale (q_i . k_j) w_h(i - j) + b_h(i - j)) v_j

A use that a backend does not serve (an embedding, dtype, device, training, dropout) is refused with
what does serve it; nothing falls back in silence.

Legend: B batch, H query heads, K key heads (K divides H), T queries, S keys, E head size, N columns
of theta.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.attention import blocked, eager, flex, fused, sdpa
from megatron.attention.backend import Backend, Use
from megatron.positional import PositionalEmbedding

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (eager, blocked, fused, sdpa, flex)
}
AUTO = {"cuda": ("fused", "blocked", "eager"), "cpu": ("blocked", "eager")}
"""What ``auto`` takes on a device: the first that serves."""


class AttentionError(ValueError):
    """A backend that cannot be had, or inputs that make no sense; the message says what to use."""


@dataclass(frozen=True)
class AttentionFn:
    """A chosen backend, to be called.

    Attributes:
        name: the backend's.
        reason: why it was chosen, for the log.
        use: what it was chosen for; another dtype or device, gradients or dropout that it does not
            serve are an error when they come.
    """

    name: str
    reason: str
    use: Use = field(repr=False)

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
        input embeddings are the model's business: they add nothing here.

        Args:
            theta_HN: the kernel's parameters for these heads; needed for distance kernels only.
            scale: on the products of query and key, usually 1/sqrt(E).
            dropout_p: probability of dropping a softmax weight; draws from the default generator
                of q's device.
            query_offset: position of the first query; keys are at 0 ... S-1, and every query's own
                key must be among them (query_offset + T <= S). Later keys are never seen, whatever
                they hold: room in a cache need not be filled.
        """
        backend = BACKENDS[self.name]
        check(q_BHTE, k_BKSE, v_BKSE, pos, theta_HN, scale, dropout_p, query_offset)
        inputs = (q_BHTE, k_BKSE, v_BKSE, theta_HN)
        gradients = any(x is not None and x.requires_grad for x in inputs)
        beyond = replace(
            self.use,
            device_type=q_BHTE.device.type,
            dtype=q_BHTE.dtype,
            training=self.use.training or (gradients and torch.is_grad_enabled()),
            dropout=self.use.dropout or dropout_p > 0.0,
            head_size=q_BHTE.shape[-1],
        )
        if beyond != self.use and (why := refusal(backend, beyond)):
            raise refused(self.name, why, beyond)
        group = q_BHTE.shape[1] // k_BKSE.shape[1]
        seen = query_offset + q_BHTE.shape[2]
        if seen < k_BKSE.shape[2]:  # there may be anything, even NaN, which times 0 is NaN
            k_BKSE, v_BKSE = k_BKSE[:, :, :seen], v_BKSE[:, :, :seen]
        if group > 1 and not backend.grouped:
            k_BKSE, v_BKSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
        with torch.autocast(q_BHTE.device.type, enabled=False):
            return backend.function(
                q_BHTE,
                k_BKSE,
                v_BKSE,
                pos,
                theta_HN,
                scale=scale,
                dropout_p=dropout_p,
                query_offset=query_offset,
            )


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
    """Look up a backend for a use; see :class:`megatron.attention.backend.Use`.

    Raises:
        AttentionError: the backend is unknown, or does not serve this use; the message names those
            that do.
    """
    use = Use(pos, device_type, dtype, training, dropout, head_size)
    if backend == "auto":
        passed = []
        for name in AUTO.get(device_type, AUTO["cpu"]):
            why = refusal(BACKENDS[name], use)
            if why is None:
                remark = BACKENDS[name].remark(use)
                reason = "; ".join([f"auto: for {pos.name} in {dtype} on {device_type}", *passed])
                return AttentionFn(name, f"{reason}{': ' if remark else ''}{remark}", use)
            passed.append(f"{name} {why}")
    if backend not in BACKENDS:
        near = difflib.get_close_matches(backend, ["auto", *BACKENDS], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        offered = ", ".join(["auto", *BACKENDS])
        raise AttentionError(f"no attention_backend {backend!r}; {hint}There are: {offered}")
    if why := refusal(BACKENDS[backend], use):
        raise refused(backend, why, use)
    remark = BACKENDS[backend].remark(use)
    return AttentionFn(backend, ", ".join(filter(None, ("as configured", remark))), use)


def refusal(backend: Backend, use: Use) -> str | None:
    """Why the backend does not serve this use, or None."""
    sixteen_bit = use.dtype in (torch.bfloat16, torch.float16)
    if use.pos.numerics.published and sixteen_bit and not backend.rounds_as_published:
        return "computes in fp32, so it cannot round as published_numerics asks"
    return backend.refusal(use)


def refused(backend: str, why: str, use: Use) -> AttentionError:
    others = [name for name, each in BACKENDS.items() if refusal(each, use) is None]
    serve = ", ".join(["auto", *others])
    return AttentionError(
        f"attention_backend {backend} {why}. For pos_emb {use.pos.name} in {use.dtype} on "
        f"{use.device_type} use {serve}"
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
    """Choose and call at once, for tests, tools and notebooks; see :class:`AttentionFn`."""
    inputs = (q_BHTE, k_BKSE, v_BKSE, theta_HN)
    training = any(x is not None and x.requires_grad for x in inputs) and torch.is_grad_enabled()
    chosen = choose(
        backend,
        pos,
        device_type=q_BHTE.device.type,
        dtype=q_BHTE.dtype,
        training=training,
        dropout=dropout_p > 0.0,
        head_size=q_BHTE.shape[-1],
    )
    return chosen(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        pos,
        theta_HN,
        scale=scale,
        dropout_p=dropout_p,
        query_offset=query_offset,
    )


def check(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None,
    scale: float,
    dropout_p: float,
    query_offset: int,
) -> None:
    """Raise AttentionError for inputs that would give nonsense, or an obscure message, later."""
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
    if not scale > 0.0:
        raise AttentionError(f"scale must be above 0, not {scale}")
    if query_offset < 0 or query_offset + queries > keys:
        raise AttentionError(
            f"queries at positions {query_offset} ... {query_offset + queries - 1} need their own "
            f"keys, but there are {keys}: query_offset + T <= S must hold"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise AttentionError(f"dropout_p must lie in [0, 1), not {dropout_p}")
    if pos.kind == "distance":
        expected = (heads, len(pos.parameters))
        if theta_HN is None or tuple(theta_HN.shape) != expected:
            got = "none" if theta_HN is None else str(list(theta_HN.shape))
            raise AttentionError(f"{pos.name} needs theta {list(expected)}, got {got}")
