"""Register blocked and fused attention as operations of `torch.library`, for `torch.compile`.

    kerple::blocked           kerple::fused
    kerple::blocked_backward  kerple::fused_backward

A compiled graph contains these operations as they are. torch knows the shapes of their results and
how to differentiate them, and does not trace into them. The operations have no hidden state: random
numbers depend on the argument `seed` alone. Eager calls bypass these operations, because each would
add some 20 microseconds to a call.

`kerple::blocked` reads documents and seeds on the host. A CUDA graph cannot record that, so torch
leaves these operations out of its CUDA graphs and divides the graph around them.

The argument `code` of `kerple::fused` names the Triton device functions of an embedding, which
`register` has stored. `code` contains a hash of their source, so it means the same in every
process.

Legend: see `blocked` and `fused`. The T axis of `kerple::blocked` is in the usual order, but
`starts_BT` is in reversed order.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.attention.backend import AttentionError
from megatron.attention.blocked_call import BlockedCall

if TYPE_CHECKING:
    from megatron.kernels.codegen import DeviceFunctions
    from megatron.kernels.launch import Setting, Terms

_DEVICE_FUNCTIONS: dict[str, DeviceFunctions] = {}
_NOT_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("kerple::blocked", mutates_args=(), tags=_NOT_IN_CUDA_GRAPHS)
def blocked(
    q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, bias_HS: Tensor, weight_HS: Tensor | None,
    decay_BHS: Tensor | None, sink_H: Tensor | None, starts_BT: Tensor | None, seed: Tensor | None,
    scale: float, dropout_p: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Return the attention output. The arguments are those of `BlockedCall`."""
    inputs = (q_BHTE, k_BHSE, v_BHSE, bias_HS, weight_HS, decay_BHS, sink_H, starts_BT, seed)
    return BlockedCall(*inputs, scale, dropout_p, window).forward(None)


@blocked.register_fake
def _(q_BHTE: Tensor, *_: Any) -> Tensor:
    return _new(q_BHTE)


@torch.library.custom_op("kerple::blocked_backward", mutates_args=(), tags=_NOT_IN_CUDA_GRAPHS)
def blocked_backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, bias_HS: Tensor,
    weight_HS: Tensor | None, decay_BHS: Tensor | None, sink_H: Tensor | None,
    starts_BT: Tensor | None, seed: Tensor | None,
    scale: float, dropout_p: float, window: int | None, need_bias: bool, need_weight: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, the bias, the factor, the decay and the sink, as a list.

    The list lacks gradients that are not needed, and those of inputs that are None.
    """
    inputs = (q_BHTE, k_BHSE, v_BHSE, bias_HS, weight_HS, decay_BHS, sink_H, starts_BT, seed)
    call = BlockedCall(*inputs, scale, dropout_p, window)
    found = call.backward(grad_BHTE, None, need_bias=need_bias, need_weight=need_weight)
    return [x for x in found if x is not None]


@blocked_backward.register_fake
def _(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, bias_HS: Tensor,
    weight_HS: Tensor | None, decay_BHS: Tensor | None, sink_H: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    *_, need_bias, need_weight = rest
    found = [q_BHTE, k_BHSE, v_BHSE, bias_HS if need_bias else None]
    found.append(weight_HS if need_weight else None)
    found = [_new(x) for x in found if x is not None]
    found += [] if decay_BHS is None else [_new(decay_BHS, torch.float64)]
    return found + ([] if sink_H is None else [_new(sink_H, bias_HS.dtype)])


def _save_blocked(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.numbers = inputs[9:]


def _differentiate_blocked(ctx: Any, grad_BHTE: Tensor) -> tuple:
    inputs = ctx.saved_tensors
    needs = ctx.needs_input_grad[3:5]
    found = iter(torch.ops.kerple.blocked_backward(grad_BHTE, *inputs, *ctx.numbers, *needs))
    given = (True, True, True, *needs, *(x is not None for x in inputs[5:7]))
    return *(next(found) if has else None for has in given), *[None] * 5


blocked.register_autograd(_differentiate_blocked, setup_context=_save_blocked)


def register(name: str, functions: DeviceFunctions) -> str:
    """Store the device functions, and return their name `code` for calls of `kerple::fused`."""
    flags = functions.num_theta, functions.weighted, functions.tabulated, functions.biased
    flags += (functions.layer,)
    digest = hashlib.sha256(f"{flags} {functions.source}".encode()).hexdigest()
    code = f"{name} {digest[:16]}"
    _DEVICE_FUNCTIONS[code] = functions
    return code


@torch.library.custom_op("kerple::fused", mutates_args=())
def fused(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, rows_HW: Tensor, sink_H: Tensor | None,
    decay_BHS: Tensor | None, first_BT: Tensor | None, position_BT: Tensor | None,
    seed: Tensor | None, code: str, scale: float, query_offset: int, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention output, and `lse` for the backward pass; see `launch.forward`."""
    from megatron.kernels import launch

    terms = launch.Terms(first_BT, sink_H, decay_BHS, position_BT)
    setting = _setting(code, scale, query_offset, dropout_p, terms)
    return launch.forward(q_BHTE, k_BKSE, v_BKSE, rows_HW, seed, setting, terms)


@fused.register_fake
def _(q_BHTE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _new_heads(q_BHTE), q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kerple::fused_backward", mutates_args=())
def fused_backward(
    grad_BHTE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor,
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, rows_HW: Tensor, sink_H: Tensor | None,
    decay_BHS: Tensor | None, first_BT: Tensor | None, position_BT: Tensor | None,
    seed: Tensor | None, code: str, scale: float, query_offset: int, dropout_p: float,
    need_rows: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, `rows_HW`, the sink and the decay, as a list.

    `rows_HW` holds theta or a table over distances. Its gradient is in the list only if `need_rows`
    is true. The list lacks gradients of inputs that are None.
    """
    from megatron.kernels import launch

    terms = launch.Terms(first_BT, sink_H, decay_BHS, position_BT)
    setting = _setting(code, scale, query_offset, dropout_p, terms)
    found = launch.backward(
        grad_BHTE, q_BHTE, k_BKSE, v_BKSE, out_BHTE, lse_BHT, rows_HW, seed, setting, need_rows,
        terms,
    )  # fmt: skip
    return [x for x in found if x is not None]


@fused_backward.register_fake
def _(
    grad_BHTE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor,
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, rows_HW: Tensor, sink_H: Tensor | None,
    decay_BHS: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    found = [_new_heads(x) for x in (q_BHTE, k_BKSE, v_BKSE)]
    terms = (rows_HW if rest[-1] else None, sink_H, decay_BHS)
    return found + [_new(x, torch.float32) for x in terms if x is not None]


def _save_fused(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    out_BHTE, lse_BHT = output
    ctx.mark_non_differentiable(lse_BHT)
    ctx.save_for_backward(out_BHTE, lse_BHT, *inputs[:9])
    ctx.numbers = inputs[9:]


def _differentiate_fused(ctx: Any, grad_BHTE: Tensor, _: Any) -> tuple:
    saved, need_rows = ctx.saved_tensors, ctx.needs_input_grad[3]
    found = iter(torch.ops.kerple.fused_backward(grad_BHTE, *saved, *ctx.numbers, need_rows))
    given = (True, True, True, need_rows, *(x is not None for x in saved[6:8]))
    return *(next(found) if has else None for has in given), *[None] * 7


fused.register_autograd(_differentiate_fused, setup_context=_save_fused)


def _setting(code: str, scale: float, offset: int, dropout_p: float, terms: Terms) -> Setting:
    from megatron.kernels import launch

    if code not in _DEVICE_FUNCTIONS:
        raise AttentionError(
            f"this process has no device functions {code!r}: first compile a call of attention "
            "with this embedding"
        )
    some = any(x is not None for x in (terms.first_BT, terms.sink_H, terms.decay_BHS))
    return launch.Setting(_DEVICE_FUNCTIONS[code], scale, offset, dropout_p, terms=some)


def _new(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised contiguous tensor with the shape of `x`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _new_heads(x_BHTE: Tensor) -> Tensor:
    """Return an uninitialised tensor in the memory layout of `launch.empty_like_heads`."""
    return _new(x_BHTE.transpose(1, 2)).transpose(1, 2)
