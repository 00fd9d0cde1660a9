"""Register blocked and fused attention as operations of `torch.library`, for `torch.compile`.

    kerple::blocked           kerple::fused
    kerple::blocked_backward  kerple::fused_backward

A compiled graph contains these operations as they are. torch does not trace into the operations.
They are registered with the shapes of their results, and with their gradients. The operations have
no hidden state: random numbers depend on the argument `seed` alone. Eager calls bypass these
operations, because an operation adds some 20 microseconds to a call.

`kerple::blocked` reads documents and seeds on the host. A CUDA graph cannot record such a read.
Therefore torch excludes the two blocked operations from its CUDA graphs, and divides the graph
around them.

The argument `code` of `kerple::fused` names the Triton device functions of an embedding, which
`register` has stored. `code` contains a hash of the functions' source. Therefore equal codes mean
equal functions, in every process.

Legend: see `blocked` and `fused`. The T axis of `kerple::blocked` is in the usual order, but
`starts_BT` is in reversed order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.attention.backend import AttentionError
from megatron.attention.tiled.blocked_call import BlockedCall

if TYPE_CHECKING:
    from megatron.kernels.device_functions import DeviceFunctions
    from megatron.kernels.launch import Setting

_DEVICE_FUNCTIONS: dict[str, DeviceFunctions] = {}
_NOT_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)
_BLOCKED = (
    "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? weight, Tensor? decay, Tensor? sink, "
    "Tensor? starts, Tensor? seed, float scale, float dropout_p, SymInt? window"
)
_FUSED = (
    "Tensor q, Tensor k, Tensor v, Tensor rows, Tensor? sink, Tensor? decay, Tensor? first, "
    "Tensor? position, Tensor? seed, str code, float scale, SymInt query_offset, float dropout_p, "
    "bool backward"
)
_RESULTS = "Tensor out, Tensor lse, Tensor lost"
# The number of tensor arguments of `blocked`, and also of `fused`. They precede the others.
_TENSORS = 9


@torch.library.custom_op(
    "kerple::blocked", mutates_args=(), schema=f"({_BLOCKED}) -> Tensor", tags=_NOT_IN_CUDA_GRAPHS
)
def blocked(*arguments: Any) -> Tensor:
    """Return the output of attention that is computed tile by tile."""
    return BlockedCall(*arguments).forward(None)


@torch.library.custom_op(
    "kerple::blocked_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_BLOCKED}, bool need_bias, bool need_weight) -> Tensor[]",
    tags=_NOT_IN_CUDA_GRAPHS,
)
def blocked_backward(grad_BHTE: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients of attention that is computed tile by tile."""
    *inputs, need_bias, need_weight = arguments
    call = BlockedCall(*inputs)
    found = call.backward(grad_BHTE, None, need_bias=need_bias, need_weight=need_weight)
    return [x for x in found if x is not None]


@blocked.register_fake
def _(q_BHTE: Tensor, *_: Any) -> Tensor:
    return _new(q_BHTE)


@blocked_backward.register_fake
def _(grad_BHTE: Tensor, *arguments: Any) -> list[Tensor]:
    *qkv, bias_HS, weight_HS, decay_BHS, sink_H = arguments[:7]
    kernel = zip((bias_HS, weight_HS), arguments[-2:], strict=True)
    found = [_new(x) for x in (*qkv, *(x for x, need in kernel if need))]
    found += [] if decay_BHS is None else [_new(decay_BHS, torch.float64)]
    return found + ([] if sink_H is None else [_new(sink_H, bias_HS.dtype)])


def register(name: str, functions: DeviceFunctions) -> str:
    """Store the Triton functions of an embedding, and return a name for them.

    Args:
        name: The name of the embedding. The returned name begins with it.
        functions: The Triton functions.
    """
    flags = functions.num_theta, functions.weighted, functions.tabulated, functions.biased
    flags += (functions.layer,)
    # So the name means the same in every process.
    digest = hashlib.sha256(f"{flags} {functions.source}".encode()).hexdigest()
    code = f"{name} {digest[:16]}"
    _DEVICE_FUNCTIONS[code] = functions
    return code


def fused_forward(setting: Setting, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention output, and two tensors that the backward pass needs."""
    from megatron.kernels import launch

    q, k, v, rows, *terms, seed = inputs
    return launch.forward(q, k, v, rows, seed, setting, launch.Terms(*terms))


def fused_gradients(
    setting: Setting, need_rows: bool, grad: Tensor, out: Tensor, lse: Tensor, lost: Tensor,
    *inputs: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of attention, computed by Triton kernels. Some gradients may be None."""
    from megatron.kernels import launch

    q, k, v, rows, *terms, seed = inputs
    terms = launch.Terms(*terms)
    return launch.backward(grad, q, k, v, out, lse, lost, rows, seed, setting, need_rows, terms)


@torch.library.custom_op(
    "kerple::fused", mutates_args=(), schema=f"({_FUSED}) -> (Tensor, Tensor, Tensor)"
)
def fused(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of attention by Triton kernels, and two tensors for the backward pass."""
    return fused_forward(setting_of(*arguments[_TENSORS:]), *arguments[:_TENSORS])


@torch.library.custom_op(
    "kerple::fused_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_RESULTS}, {_FUSED}, bool need_rows) -> Tensor[]",
)
def fused_backward(*arguments: Any) -> list[Tensor]:
    """Return a list of the needed gradients of attention, computed by Triton kernels."""
    count = 4 + _TENSORS
    *numbers, need_rows = arguments[count:]
    found = fused_gradients(setting_of(*numbers), need_rows, *arguments[:count])
    return [x for x in found if x is not None]


@fused.register_fake
def _(q_BHTE: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    keeps = others[-1] and q_BHTE.dtype != torch.float32
    lost = _new_heads(q_BHTE if keeps else q_BHTE[:0])
    return _new_heads(q_BHTE), q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.float32), lost


@fused_backward.register_fake
def _(grad_BHTE: Tensor, out: Tensor, lse: Tensor, lost: Tensor, *arguments: Any) -> list[Tensor]:
    *qkv, rows_HW, sink_H, decay_BHS = arguments[:6]
    terms = (rows_HW if arguments[-1] else None, sink_H, decay_BHS)
    return [_new_heads(x) for x in qkv] + [_new(x, torch.float32) for x in terms if x is not None]


def _save(ctx: Any, inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
    results = () if isinstance(output, Tensor) else output  # of a fused operation: (out, lse, lost)
    ctx.mark_non_differentiable(*results[1:])
    ctx.save_for_backward(*results, *inputs[:_TENSORS])
    ctx.numbers = inputs[_TENSORS:]


def _differentiate(backward: Any, learned: int, ctx: Any, grad_BHTE: Tensor, *_: Any) -> tuple:
    """Return one gradient for each argument of an attention operation.

    Args:
        backward: The operation that computes the gradients.
        learned: The number of arguments between v and the pair (decay, sink). All of them may have
            a gradient.
        ctx: The autograd context, in which `_save` has stored the arguments.
        grad_BHTE: The gradient of the attention output.
    """
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad[3 : 3 + learned]
    terms = saved[-_TENSORS:][3 + learned : 5 + learned]
    found = iter(backward(grad_BHTE, *saved, *ctx.numbers, *needs))
    given = (True, True, True, *needs, *(x is not None for x in terms))
    gradients = [next(found) if has else None for has in given]
    return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


for _operation, _backward, _learned in ((blocked, blocked_backward, 2), (fused, fused_backward, 1)):
    _operation.register_autograd(partial(_differentiate, _backward, _learned), setup_context=_save)


@lru_cache(maxsize=64)
def setting_of(code: str, scale: float, offset: int, dropout_p: float, backward: bool) -> Setting:
    """Return the `Setting` of an attention call, made of the arguments that are not tensors.

    Raises:
        AttentionError: No Triton functions are registered in this process under the name `code`.
    """
    from megatron.kernels import launch

    if code not in _DEVICE_FUNCTIONS:
        raise AttentionError(
            f"this process has no device functions {code!r}: first compile a call of attention "
            "with this embedding"
        )
    return launch.Setting(_DEVICE_FUNCTIONS[code], scale, offset, dropout_p, backward=backward)


def _new(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised contiguous tensor with the shape of `x`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _new_heads(x_BHTE: Tensor) -> Tensor:
    """Return an uninitialised tensor of `x_BHTE`'s shape, with queries before heads in memory."""
    # In memory, the order is [batch, queries, heads, head size], as in `launch.empty_like_heads`.
    return _new(x_BHTE.transpose(1, 2)).transpose(1, 2)
