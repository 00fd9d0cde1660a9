"""Fused attention: Triton kernels that evaluate the kernel of distance in registers.

No quadratic buffer, exact gradients of theta, the same bits at every repetition. The embedding's
torch formula becomes device functions (``formula``, ``megatron.kernels.codegen``); where it has no
expression, it is tabulated over distances once per call, and the gradient of the table goes back
through the formula by autograd (``megatron.kernels.tabulated``).

Memory beside the results: two numbers per query and head, a number per theta and program, and for
tables the table.

Legend: B batch, H query heads, K key heads, T queries, S keys, E head size, N columns of theta, W
numbers per head that describe the kernel: N, or table entries.

Caution: fp64 is refused, and so is bf16 in Triton's interpreter, which gets it wrong. Head sizes
that are no power of two cost as much as the next one.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.attention.backend import Backend, Use, first_order
from megatron.attention.trace import Unreadable, read
from megatron.positional import PositionalEmbedding

if TYPE_CHECKING:
    from megatron.kernels.codegen import DeviceFunctions
    from megatron.kernels.launch import Setting

MAX_HEAD_SIZE = 256
LOWEST = -1e30
OLDEST = (8, 0)
"""Compute capability from which tensor cores take bf16 and copies run asynchronously: Ampere."""


@lru_cache(maxsize=64)
def functions_of(pos: PositionalEmbedding) -> tuple[DeviceFunctions, str]:
    """(device functions, how they were made: "formula" or why it is a table)."""
    from megatron.kernels import codegen as formula
    from megatron.kernels import tabulated as table

    try:
        found = read(pos)
        functions = formula.device_functions(
            pos.name, found.bias, found.weight, found.distance, found.theta
        )
    except (Unreadable, formula.NotExpressible) as reason:
        one_HN, d = torch.ones(1, len(pos.parameters)), torch.arange(2)
        has = (part(one_HN, d) is not None for part in (pos.bias, pos.weight))
        return table.device_functions(*has), f"tabulated, {reason}"
    return functions, "evaluated in registers"


# torch.compile leaves the call as it is: it would follow the formula's reading into sympy.
# (torch.compiler.disable says the same, but imports the compiler here already: a second or two.)
@torch._disable_dynamo
def fused(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
    query_offset: int,
) -> Tensor:
    """See :class:`megatron.attention.choice.AttentionFn`."""
    from megatron.kernels.launch import Setting

    functions, _ = functions_of(pos)
    heads, queries = q_BHTE.shape[1:3]
    if pos.kind != "distance":
        rows_HW = q_BHTE.new_zeros(heads, 1, dtype=torch.float32)
    elif functions.tabulated:
        rows_HW = tabulate(pos, theta_HN.float(), query_offset + queries, scale)
    else:
        rows_HW = theta_HN.float().contiguous()
    seed = None
    if dropout_p:
        seed = torch.randint(1 << 62, (1,), device=q_BHTE.device)  # stays there: nothing waits
    setting = Setting(functions, scale, query_offset, dropout_p)
    return FusedAttention.apply(q_BHTE, k_BKSE, v_BKSE, rows_HW, seed, setting)


def tabulate(pos: PositionalEmbedding, theta_HN: Tensor, length: int, scale: float) -> Tensor:
    """[H, W]: b(d) / scale for d = 0 ... length - 1, then w(d), whichever there are.

    A distance that is never seen (b = -inf) gets a finite LOWEST, since a tile may hold no other.
    """
    d = torch.arange(length, device=theta_HN.device)
    bias_HS, weight_HS = pos.bias(theta_HN, d), pos.weight(theta_HN, d)
    parts = [] if bias_HS is None else [(bias_HS.float() / scale).clamp(min=LOWEST)]
    parts += [] if weight_HS is None else [weight_HS.float()]
    return torch.cat(parts, dim=1).contiguous()


class FusedAttention(torch.autograd.Function):
    """Keeps its inputs, its output, and the logarithms of the softmax's denominators."""

    @staticmethod
    def forward(ctx, q, k, v, rows, seed: Tensor | None, setting: Setting) -> Tensor:
        from megatron.kernels import launch

        out, lse = launch.forward(q, k, v, rows, seed, setting)
        ctx.save_for_backward(q, k, v, out, lse, rows, seed)
        ctx.setting = setting
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        from megatron.kernels import launch

        q, k, v, out, lse, rows, seed = ctx.saved_tensors
        gradients = launch.backward(
            grad, q, k, v, out, lse, rows, seed, ctx.setting, ctx.needs_input_grad[3]
        )
        return *gradients, None, None


def refusal(use: Use) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if use.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"computes in fp32 and does not serve {use.dtype}"
    if use.head_size is not None and use.head_size > MAX_HEAD_SIZE:
        return f"serves head sizes up to {MAX_HEAD_SIZE}, not {use.head_size}"
    from megatron.kernels.device import INTERPRETED

    if INTERPRETED:
        if use.dtype == torch.bfloat16:
            return "is wrong in bf16 in Triton's interpreter (TRITON_INTERPRET=1): write fp32 there"
        return None
    if use.device_type != "cuda":
        return "needs a CUDA GPU (or Triton's slow interpreter: TRITON_INTERPRET=1, for tests)"
    if torch.version.hip is not None:
        return "is written for NVIDIA GPUs"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST:
        return "needs a GPU of compute capability 8.0 (Ampere) or newer"
    return None


def remark(use: Use) -> str:
    from megatron.kernels.device import INTERPRETED

    how = [f"kernel {functions_of(use.pos)[1]}"] if use.pos.kind == "distance" else []
    return ", ".join([*how, *(["in Triton's slow interpreter"] if INTERPRETED else [])])


BACKEND = Backend("fused", fused, refusal, remark, grouped=True)
