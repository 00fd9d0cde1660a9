"""Check an embedding's formulas and parameters when `attend` first uses the embedding.

Legend: see `choice`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.attention.backend import AttentionError, constant
from megatron.attention.formulas.trace import PROBES, parts_of
from megatron.positional import PositionalEmbedding

_CHECKED: set[PositionalEmbedding] = set()


def check_embedding(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Check an embedding's parameters and formulas at its first use.

    Raises:
        AttentionError: A parameter is out of its bounds, or a formula is wrong for some distance.
    """
    if pos not in _CHECKED:
        _check_apart(pos, theta_HN.detach().cpu())
        _CHECKED.add(pos)


@constant
def check_initial_formulas(pos: PositionalEmbedding, heads: int) -> None:
    """Check an embedding's formulas with initial values of its parameters."""
    if pos not in _CHECKED:
        _check_apart(pos, pos.initial_theta(heads, torch.Generator().manual_seed(0)))


def _check_apart(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Check an embedding in a new thread, so that the caller's torch modes have no effect."""
    # such as inference mode, a default device, and hooks on saved tensors
    with ThreadPoolExecutor(1) as thread:
        if pos.parameters:
            thread.submit(_check_bounds, pos, theta_HN).result()
        if pos.has("distance"):
            thread.submit(_check_formulas, pos, theta_HN).result()


def _check_bounds(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Check that all parameters of an embedding are within their bounds."""
    for theta_H, parameter in zip(theta_HN.unbind(1), pos.parameters, strict=True):
        near_H = theta_H.float() if theta_H.dtype == torch.float64 else theta_H  # as fp32 clamps it
        low, high = near_H.new_tensor([parameter.low, parameter.high])
        outside_H = ~((near_H >= low) & (near_H <= high))
        if outside_H.any():
            head = int(outside_H.nonzero()[0])
            raise AttentionError(
                f"{pos.name}: theta's column {parameter.name} is {theta_H[head]:g} in head {head}, "
                f"but must lie in [{parameter.low:g}, {parameter.high:g}]; clamp theta after each "
                "step by megatron.positional.within_bounds(theta, pos.parameters)"
            )


class _Watch(TorchFunctionMode):
    """Torch mode that records which function first computes NaN or infinity."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self.note, func))
        self.note(func, found)
        return found

    def note(self, func: Any, x: Any) -> None:
        if not self.name and isinstance(x, Tensor) and not x.isfinite().all():
            self.name = func.__name__


def _check_formulas(pos: PositionalEmbedding, theta_HN: Tensor) -> None:
    """Check the shapes, values and gradients of an embedding's formulas."""
    theta_HN = theta_HN.to(torch.float64, copy=True).requires_grad_()
    d_1TS = torch.tensor(PROBES, dtype=torch.float64).view(1, 2, -1)
    for method, function in zip(("bias", "weight"), parts_of(pos), strict=True):
        name = f"{pos.name}.{method}"
        try:
            with _Watch() as watch:
                value_HTS = function(theta_HN, d_1TS, d_1TS + 3)
        except (IndexError, RuntimeError) as error:
            hint = "self.columns(theta_HN, d) gives d and columns that fit together"
            if isinstance(error, IndexError):
                hint = f"write values for distances up to {PROBES[-1]:g}, or clamp d to the last"
            raise AttentionError(f"{name}: {error}; {hint}") from error
        if value_HTS is not None:
            _check_formula(name, value_HTS, theta_HN, d_1TS, watch)
            some_1TS = d_1TS[..., :2].flip(1, 2)  # without the largest distance
            again_HTS = function(theta_HN, some_1TS, some_1TS + 3)
            same = value_HTS[..., :2].flip(2, 3)
            if again_HTS is None or not torch.allclose(again_HTS, same, 1e-5, 1e-6):
                raise AttentionError(
                    f"{name} has returned other values for the same distances in another order; it "
                    "must treat each distance by itself (no cumsum, d.max() or random numbers)"
                )


def _check_formula(
    name: str, value_HTS: Tensor, theta_HN: Tensor, d_1TS: Tensor, watch: _Watch
) -> None:
    """Check the shape, values and gradients of one formula."""
    shape = (len(theta_HN), *d_1TS.shape)
    if tuple(value_HTS.shape) != shape:
        raise AttentionError(
            f"{name} has returned the shape {list(value_HTS.shape)} for "
            f"{len(theta_HN)} heads and distances {list(d_1TS.shape)}, but must return "
            f"{list(shape)}: the heads first; self.columns(theta_HN, d) gives columns that fit"
        )
    for place, distance in enumerate(PROBES):
        found_H = value_HTS.flatten(1)[:, place]
        grad_HN = torch.zeros_like(theta_HN)
        if found_H.requires_grad:
            (grad_HN,) = torch.autograd.grad(found_H.sum(), theta_HN, retain_graph=True)
        hidden_H = found_H.isinf() & ((found_H > 0) | (place == 0))
        for what, x, wrong in (
            ("value", found_H, found_H.isnan() | hidden_H),
            ("gradient with respect to theta", grad_HN, grad_HN.isnan()),
        ):
            if wrong.any():
                kind = "NaN" if x[wrong][0].isnan() else f"{x[wrong][0]:g}"
                raise AttentionError(
                    f"{name}: its {what} at distance {distance:g} is {kind} for "
                    f"theta {theta_HN[wrong.view(len(theta_HN), -1).any(1)][0].tolist()}"
                    f", first in {watch.name}; change its argument, such as sqrt(x + 1e-9) or "
                    "log(x + 1). torch.where does not help, because the branch that is not taken "
                    "also has a gradient"
                )
