"""Define a layer of hidden units as a torch operation.

For an input number u, the layer's output is f(u) = sum_k v_k relu(w_k u + b_k). f is a piecewise
linear function. Its slope changes only at the knees u = -b_k / w_k. Between two neighbouring knees
f is a line, slope * u + offset. So f(u) costs one search among the knees and one product, for any
number of units. The operation is registered with torch, so that `megatron.attention.formulas.trace`
sees it as one node.

Legend: H heads, K hidden units, X numbers u per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def pieces(w_HK: Tensor, b_HK: Tensor, v_HK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lines of which f(u) = sum_k v_k relu(w_k u + b_k) consists.

    f is piecewise linear. Line m is slope * u + offset. It ends at knee m, where line m + 1 begins.

    Args:
        w_HK, b_HK, v_HK: The numbers w_k, b_k and v_k of each head [heads, hidden units].

    Returns:
        (knees [heads, K], slopes [heads, K + 1], offsets [heads, K + 1]), in rising order of u. K
            is the number of hidden units. The knees have no gradient.
    """
    with torch.no_grad():  # f has no jump at a knee, so the knees need no gradient
        at_HK = torch.where(w_HK == 0, 0.0, -b_HK / w_HK)
        knees_HK, order_HK = at_HK.sort(dim=1)
        rank_HK = order_HK.argsort(dim=1)[:, None]
        line_M1 = torch.arange(w_HK.shape[1] + 1, device=w_HK.device)[:, None]
        w_H1K, always_H1K = w_HK[:, None], (b_HK > 0)[:, None]
        active_HMK = torch.where(w_H1K > 0, line_M1 > rank_HK, line_M1 <= rank_HK)
        active_HMK = torch.where(w_H1K == 0, always_H1K, active_HMK).to(w_HK.dtype)
    slopes_HM, offsets_HM = ((active_HMK * (v_HK * x)[:, None]).sum(-1) for x in (w_HK, b_HK))
    return knees_HK, slopes_HM, offsets_HM


def _evaluate(u: Tensor, w_HK: Tensor, b_HK: Tensor, v_HK: Tensor) -> Tensor:
    knees_HK, slopes_HM, offsets_HM = pieces(w_HK, b_HK, v_HK)
    heads, lines = slopes_HM.shape
    u_HX = u.flatten(1)
    line_HX = torch.searchsorted(knees_HK, u_HX.contiguous())
    line_HX += lines * torch.arange(heads, device=u.device)[:, None]
    # An embedding lookup sums its gradient in a fixed order on every device.
    table = torch.stack((slopes_HM, offsets_HM), dim=-1).flatten(0, 1)
    slope_HX, offset_HX = F.embedding(line_HX, table).unbind(-1)
    return torch.addcmul(offset_HX, slope_HX, u_HX).view(u.shape)


def is_transformed() -> bool:
    """Return whether this code runs inside a transform of torch.func, such as `grad` or `vmap`."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None


def hidden_layer(u: Tensor, w_HK: Tensor, b_HK: Tensor, v_HK: Tensor) -> Tensor:
    """Return sum_k v_k relu(w_k u + b_k) for each number of `u` [heads, ...], in u's shape."""
    if is_transformed():  # torch.func cannot transform the operation
        return _evaluate(u, w_HK, b_HK, v_HK)
    return torch.ops.kerple.hidden_layer(u, w_HK, b_HK, v_HK)


class _HiddenLayer(torch.autograd.Function):
    """Autograd function of a layer of hidden units. It saves only the inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return hidden_layer(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again, inputs = torch.is_grad_enabled(), ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x if again and x.requires_grad else x.detach() for x in inputs]
            inputs = [x if x.requires_grad else x.requires_grad_() for x in inputs]
            value = _evaluate(*inputs)
        return torch.autograd.grad(value, inputs, grads, create_graph=again)


# torch.library.custom_op would import torch's compiler at the first call, which takes seconds.
# An exported model has a copy of this file, and one process may load several such models.
if not hasattr(torch.ops.kerple, "hidden_layer"):
    _LIBRARY = torch.library.Library("kerple", "DEF")
    _LIBRARY.define("hidden_layer(Tensor u, Tensor w, Tensor b, Tensor v) -> Tensor")
    _LIBRARY.impl("hidden_layer", _evaluate, "CompositeExplicitAutograd")
    _LIBRARY.impl("hidden_layer", _HiddenLayer.apply, "Autograd")
    _LIBRARY.impl("hidden_layer", lambda u, *others: torch.empty_like(u), "Meta")
