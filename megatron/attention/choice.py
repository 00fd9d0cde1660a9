"""The choice of an attention backend: looked up once, at start-up, never guessed later.

Every backend computes, for query position i = query_offset + row and key position j <= i,

    out_i = sum_j softmax_j(scale (q_i . k_j) w_h(i - j) + b_h(i - j)) v_j

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.attention.blocked import blocked
from megatron.attention.eager import eager
from megatron.positional import PositionalEmbedding

BACKENDS: dict[str, Callable[..., Tensor]] = {"eager": eager, "blocked": blocked}
PLANNED = ("fused", "flex", "sdpa")


class AttentionError(ValueError):
    """A backend that cannot be had, or inputs that make no sense; the message says what to use."""


@dataclass(frozen=True)
class AttentionFn:
    """A chosen backend, to be called.

    Attributes:
        name: the backend's.
        reason: why it was chosen, for the log.
    """

    name: str
    reason: str
    function: Callable[..., Tensor] = field(repr=False)

    def __call__(
        self,
        q_BHTE: Tensor,
        k_BHSE: Tensor,
        v_BHSE: Tensor,
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
                key must be among them (query_offset + T <= S). Later keys are never seen.
        """
        check(q_BHTE, k_BHSE, v_BHSE, pos, theta_HN, dropout_p, query_offset)
        with torch.autocast(q_BHTE.device.type, enabled=False):
            return self.function(
                q_BHTE,
                k_BHSE,
                v_BHSE,
                pos,
                theta_HN,
                scale=scale,
                dropout_p=dropout_p,
                query_offset=query_offset,
            )


def choose(
    backend: str, pos: PositionalEmbedding, *, device_type: str, dtype: torch.dtype
) -> AttentionFn:
    """Look up a backend for this embedding, device ("cpu", "cuda") and activation dtype.

    Raises:
        AttentionError: the backend is unknown, not built yet, or computes in fp32 where the
            published rounding was asked for; the message names alternatives.
    """
    if pos.published is not None and dtype in (torch.bfloat16, torch.float16):
        if backend not in ("auto", "eager"):
            raise AttentionError(
                f"attention_backend {backend!r} computes in fp32, so it cannot round as "
                "published_numerics asks; use eager or auto, or drop published_numerics"
            )
        return AttentionFn("eager", f"published_numerics: it alone rounds to {dtype}", eager)
    if backend == "auto":
        return AttentionFn(
            "blocked",
            f"auto: blocked serves every pos_emb ({pos.name}) in every dtype ({dtype}) on "
            f"{device_type} without a quadratic buffer",
            blocked,
        )
    if backend in BACKENDS:
        return AttentionFn(backend, "as configured", BACKENDS[backend])
    offered = ", ".join(["auto", *BACKENDS])
    if backend in PLANNED:
        raise AttentionError(f"attention_backend {backend!r} is not built yet; use {offered}")
    near = difflib.get_close_matches(backend, ["auto", *BACKENDS, *PLANNED], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise AttentionError(f"no attention_backend {backend!r}; {hint}There are: {offered}")


def attend(
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    query_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Choose and call at once, for tests, tools and notebooks; see :class:`AttentionFn`."""
    chosen = choose(backend, pos, device_type=q_BHTE.device.type, dtype=q_BHTE.dtype)
    return chosen(
        q_BHTE,
        k_BHSE,
        v_BHSE,
        pos,
        theta_HN,
        scale=scale,
        dropout_p=dropout_p,
        query_offset=query_offset,
    )


def check(
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None,
    dropout_p: float,
    query_offset: int,
) -> None:
    """Raise AttentionError for inputs that would give nonsense, or an obscure message, later."""
    batch, heads, queries, size = q_BHTE.shape
    keys = k_BHSE.shape[2]
    if k_BHSE.shape != v_BHSE.shape or k_BHSE.shape != (batch, heads, keys, size):
        raise AttentionError(
            f"q {list(q_BHTE.shape)}, k {list(k_BHSE.shape)} and v {list(v_BHSE.shape)} must agree "
            "in batch, heads and head size, and k and v in length"
        )
    if not q_BHTE.dtype == k_BHSE.dtype == v_BHSE.dtype:
        raise AttentionError(
            f"q, k and v must have one dtype, not {q_BHTE.dtype}, {k_BHSE.dtype}, {v_BHSE.dtype}"
        )
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
