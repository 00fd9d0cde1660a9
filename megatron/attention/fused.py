"""Compute attention in fused Triton kernels that evaluate the distance kernel in registers.

A distance kernel is a bias or a factor that depends only on the query-key distance. This backend
has no quadratic buffer. The gradients of theta, the distance kernel's parameters, are exact, and
all results are repeatable bit for bit. The embedding's torch formula is translated into Triton
device functions (`trace`, `megatron.kernels.codegen`). If the formula cannot be translated, its
values are tabulated over distances once per call (`megatron.kernels.tabulated`). Autograd then
propagates the gradient of the table through the formula to theta.

If few queries see many keys, as in generation, the keys are divided into parts, and the query heads
of a key head share a program (`megatron.kernels.decode`).

With documents or a window, tiles of keys that no query sees are skipped. A decay is a
running sum over positions and may be large, so differences of the decay are computed before
rounding to fp32 (`megatron.kernels.documents_sink_decay`).

In addition to the results, memory is needed for two numbers per query and head. If the output has
16 bits and gradients are needed, the rounding error of the output is stored for the backward pass.
This error needs as much memory as the output. Each Triton program also needs memory for one number
for each column of theta. If the formula is tabulated, memory is also needed for the table. With few
key heads, the backward pass also needs memory for fp32 partial sums of the gradients of k and v
(see `kernels.launch.parts_of`).

Legend: B batch, H query heads, K key heads, T queries, S keys, E head size, N columns of theta, W
numbers per head that describe the distance kernel. These are table entries, or the N columns of
theta. The lines of a layer of hidden units (`hidden_layer.pieces`) follow the columns of theta.

Caution: this backend refuses fp64. In Triton's interpreter it also refuses bf16, because the
interpreter computes bf16 wrongly. A head size that is not a power of two costs as much as the next
power of two. If all logits of a query are below -1e9 times `scale`, the query's output is NaN (0 in
`decode`).
"""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.torch_version import TorchVersion

from megatron.attention import operations
from megatron.attention.backend import Backend, Request, constant, wants_gradients
from megatron.attention.call import Call
from megatron.attention.first_order import first_order
from megatron.attention.formulas.torch_to_sympy import Unreadable
from megatron.attention.formulas.trace import confirms_code, parts_of, read
from megatron.positional import PositionalEmbedding
from megatron.positional.combination import columns_at
from megatron.positional.hidden_layer import pieces

if TYPE_CHECKING:
    from megatron.kernels.device_functions import DeviceFunctions
    from megatron.kernels.launch import Setting

Columns = tuple[tuple[int, ...], ...]
MAX_HEAD_SIZE = 256
LOWEST = -1e30
OLDEST = (8, 0)
"""The lowest compute capability with bf16 tensor cores and asynchronous copies (Ampere)."""
SAFE_ON_HOPPER = TorchVersion("3.7.1")
"""The first Triton version that puts a fence between asynchronous copies and Hopper's products."""


@lru_cache(maxsize=64)
def functions_of(pos: PositionalEmbedding) -> tuple[DeviceFunctions, str]:
    """Return the Triton functions that compute an embedding, and a text about them for the log."""
    import sympy

    from megatron.kernels import codegen, lowering, tabulated

    try:
        formula = read(pos)
        bounds = [(column.low, column.high) for column in pos.parameters]
        for rewrite in (sympy.sympify, sympy.factor):
            functions = codegen.device_functions(pos.name, formula, bounds, rewrite)
            if confirms_code(pos, functions):
                return functions, "evaluated in registers"
        reason = "the generated code is not exact enough for some theta or distance"
    except (Unreadable, lowering.NotExpressible) as error:
        reason = error
    one_HN, d = torch.ones(1, len(pos.parameters)), torch.arange(2)
    has = (part(one_HN, d, d) is not None for part in parts_of(pos))
    return tabulated.device_functions(*has), f"tabulated, {reason}"


@constant  # because sympy reads the formula
@lru_cache(maxsize=64)
def code_of(pos: PositionalEmbedding) -> tuple[str, bool, Columns | None]:
    """Return the name of an embedding's Triton functions, and two properties of these functions.

    The result is (code, tabulated, layer). `kerple::fused` finds the functions by the name `code`.
    `tabulated` is true if the functions read a table. `layer` has the columns of theta that belong
    to a layer of hidden units. `layer` is None if there is no such layer.
    """
    functions, _ = functions_of(pos)
    code = operations.register(pos.name, functions)
    return code, functions.tabulated, functions.layer and functions.layer.columns


@constant
def tempers(pos: PositionalEmbedding) -> bool:
    """Return whether the Triton kernels multiply the scores by the embedding's temperature."""
    # A table has no temperature.
    return not functions_of(pos.kernel_part(None, tempered=True)[0])[0].tabulated


def cache_launches(on: bool) -> None:
    """Switch on or off the cache that makes launches of Triton kernels faster.

    The setting is valid for the whole process. It does not change any results.
    """
    from megatron.kernels import compiled_variants

    compiled_variants.SWITCHES["cached"] = on


def fused(call: Call) -> Any:
    """Compute attention by this project's Triton kernels.

    Return the output [batch, heads, queries, head size], or (output, lse) if the call asks for lse.
    lse is the log-sum-exp of each softmax.
    """
    code, tabulated, layer = code_of(call.pos)
    inputs = _inputs(call, tabulated, layer)
    numbers = (call.scale, call.query_offset, call.dropout_p, wants_gradients(call))
    if is_compiling():
        return operations.fused(*inputs, code, *numbers)[0]
    out_BHTE, lse_BHT = _FusedAttention.apply(operations.setting_of(code, *numbers), *inputs)
    return (out_BHTE, _natural(call, lse_BHT)) if call.return_lse else out_BHTE


def _natural(call: Call, lse_BHT: Tensor) -> Tensor:
    """Convert the log-sum-exp of each softmax from base 2 to base e."""
    lse_BHT = lse_BHT * math.log(2.0)
    if call.decay_BHS is None:
        return lse_BHT
    from megatron.kernels.documents_sink_decay import since_reference

    # The Triton kernels leave out the term c_i - c_r of the decay c for query i.
    return lse_BHT + since_reference(call.decay_BHS, call.query_offset)


def _inputs(call: Call, tabulated: bool, layer: Columns | None) -> tuple[Tensor | None, ...]:
    """Return the tensors that the Triton kernels need. None stands for an absent tensor."""
    q_BHTE, offset = call.q_BHTE, call.query_offset
    heads, queries = q_BHTE.shape[1:3]
    tempered = call.pos.has("temperature")
    if not (call.has_kernel or tempered):
        rows_HW = q_BHTE.new_zeros(heads, 1, dtype=torch.float32)
    elif tabulated:
        rows_HW = tabulate(call.pos, call.theta.float(), offset + queries, call.scale)
    else:
        rows_HW = call.theta.float().contiguous()
        if layer is not None:
            lines = pieces(*(columns_at(rows_HW, columns) for columns in layer))
            rows_HW = torch.cat((rows_HW, *lines), dim=1)
    seed = None
    if call.dropout_p:
        seed = torch.randint(1 << 62, (1,), device=q_BHTE.device)  # never copied to the host
    first_BT = call.first_keys()
    if first_BT is not None:
        first_BT = first_BT.int().expand(len(q_BHTE), -1).contiguous()
    position_BT = None
    if call.pos.reads_position or tempered:
        positions = call.positions if call.pos.reads_position else call.temperature_positions
        position_BT = positions().int().expand(len(q_BHTE), -1).contiguous()
    inputs = (q_BHTE, call.k_BKSE, call.v_BKSE, rows_HW, call.sink_H, call.decay_BHS)
    return *inputs, first_BT, position_BT, seed


def tabulate(pos: PositionalEmbedding, theta_HN: Tensor, length: int, scale: float) -> Tensor:
    """Return a table of an embedding's bias and weight at the distances 0 ... `length` - 1.

    The table has one row for each head. The row contains the bias divided by `scale` at all
    distances, then the weight at all distances. If the embedding has no bias, the row contains only
    the weight. If the embedding has no weight, the row contains only the bias.
    """
    d = torch.arange(length, device=theta_HN.device)
    bias_HS, weight_HS = pos.bias(theta_HN, d), pos.weight(theta_HN, d)
    # The kernels multiply the sum of query-key product and bias by `scale`. Where the bias is
    # -inf, the table has the finite number `LOWEST`. Otherwise, the softmax would compute -inf -
    # (-inf) = NaN in a tile that has only such distances.
    tables = [] if bias_HS is None else [(bias_HS.float() / scale).clamp(min=LOWEST)]
    tables += [] if weight_HS is None else [weight_HS.float()]
    return torch.cat(tables, dim=1).contiguous()


class _FusedAttention(torch.autograd.Function):
    """Autograd function that computes attention by this project's Triton kernels."""

    @staticmethod
    def forward(ctx: Any, setting: Setting, *inputs: Any) -> tuple[Tensor, Tensor]:
        # A direct call: an operation registered with torch would also pay for torch's dispatcher.
        out, lse, lost = operations.fused_forward(setting, *inputs)
        ctx.save_for_backward(out, lse, lost, *inputs)
        ctx.set_materialize_grads(False)
        ctx.setting = setting
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple:
        if grad_lse is not None:
            raise NotImplementedError(
                "lse has no gradient in the backend fused: use blocked or eager, or lse.detach()"
            )
        needed, saved = ctx.needs_input_grad[4], ctx.saved_tensors
        return None, *operations.fused_gradients(ctx.setting, needed, grad, *saved), *[None] * 3


def refusal(request: Request) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"computes in fp32 and does not serve {request.dtype}"
    if request.head_size is not None and request.head_size > MAX_HEAD_SIZE:
        return f"serves head sizes up to {MAX_HEAD_SIZE}, not {request.head_size}"
    kernel, _ = request.pos.kernel_part(None)
    if kernel.reads_position and functions_of(kernel)[0].tabulated:
        return f"cannot evaluate {kernel.name} in registers, and no table can hold it"
    from megatron.kernels.device import INTERPRETED

    if INTERPRETED:
        if request.dtype == torch.bfloat16:
            return "is wrong in bf16 in Triton's interpreter (TRITON_INTERPRET=1): write fp32 there"
        return None
    if request.device_type == "meta":  # allocates all tensors, and launches nothing
        return None
    if request.device_type != "cuda":
        return "needs a CUDA GPU (or Triton's slow interpreter: TRITON_INTERPRET=1, for tests)"
    if torch.version.hip is not None:
        return "is written for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return None
    if (capability := torch.cuda.get_device_capability()) < OLDEST:
        return "needs a GPU of compute capability 8.0 (Ampere) or newer"
    import triton

    if capability[0] == 9 and TorchVersion(triton.__version__) < SAFE_ON_HOPPER:
        return (
            f"needs Triton {SAFE_ON_HOPPER} or newer on Hopper GPUs: Triton {triton.__version__} "
            "lets their matrix products read data before it has arrived"
        )
    return None


def remark(request: Request) -> str:
    from megatron.kernels.device import INTERPRETED

    kernel, _ = request.pos.kernel_part(None)
    how = [f"kernel {functions_of(kernel)[1]}"] if kernel.has("distance") else []
    return ", ".join([*how, *(["in Triton's slow interpreter"] if INTERPRETED else [])])


BACKEND = Backend("fused", fused, refusal, remark, grouped=True, gives_lse=True, tempers=tempers)
