"""Store, order and group theta, the parameters of the distance kernel.

A distance kernel is a bias or factor in attention that depends only on the query-key distance. The
first layer returns theta in at least fp32, and every block reads this returned tensor. Therefore
autograd sums theta's gradient over the blocks in fp32. Under bf16 training the stored theta is
bf16, and the optimizer stores an fp32 master copy of theta.

Theta [heads, columns] is a table with one column for each parameter. The columns are stored in up
to three tensors, by their kind:

    theta          [heads, columns]   trained, with a value for each head
    shared_theta   [1, columns]       trained, with one value for all heads
    fixed_theta    [heads, columns]   not trained, such as ALiBi's slopes; not in checkpoints

A trained column is frozen if `theta_frozen` names it: then its gradient is 0.

Legend: H heads of this rank, N columns of theta.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.shape import Plan
from megatron.parallel.collectives import copy_to
from megatron.parallel.rng import named_generator
from megatron.parallel.sharding import Sharding, mark_sharding
from megatron.positional import PositionalEmbedding, within_bounds

THETA, SHARED_THETA = "embedding.theta", "embedding.shared_theta"
"""The names of the trained parts of theta in the model and in checkpoints."""
BY_HEADS = Sharding(0)
MOST_COLUMNS = 8
"""If theta's columns have more names than this, `named_theta` returns a table without names."""
_LAYER = re.compile(r"^layers\.(\d+)\.")


def is_theta(name: str) -> bool:
    """Return whether the tensor `name` contains trained parameters of the positional embedding."""
    return name.rpartition(".")[2] in ("theta", "shared_theta")


def initial_theta(plan: Plan) -> Tensor:
    """Return the initial parameters of the positional embedding [this rank's heads, parameters]."""
    # All parameters are drawn, for all heads, so no draw depends on ranks or `theta_init`.
    # In fp32.
    generator = named_generator(plan.seed, THETA)
    theta_HN = plan.pos.initial_theta(plan.shape.block.num_heads, generator)
    for column_H, parameter in zip(theta_HN.unbind(1), plan.pos.parameters, strict=True):
        if parameter.name in plan.theta_init:
            column_H.copy_(torch.tensor(plan.theta_init[parameter.name]))
    return BY_HEADS.slice(theta_HN, plan.tp.rank, plan.tp.size)


def columns_of(pos: PositionalEmbedding, *, trained: bool, shared: bool | None = None) -> list[int]:
    """Return the indices of some parameters of `pos`. An index is a column of theta.

    Args:
        pos: The positional embedding.
        trained: True selects trained parameters. False selects parameters that are not trained.
        shared: True selects parameters that all heads share. False selects parameters with a value
            for each head. None selects parameters of both kinds.
    """
    return [
        n
        for n, parameter in enumerate(pos.parameters)
        if parameter.trained == trained and shared in (None, parameter.shared)
    ]


def divided_theta(pos: PositionalEmbedding, theta_HN: Tensor) -> dict[str, Tensor]:
    """Divide the trained parameters of `pos` into the tensors of a checkpoint, by tensor name.

    The tensor `embedding.theta` contains the parameters with a value for each head. The tensor
    `embedding.shared_theta` contains the parameters that all heads share, if there are any.
    """
    own, shared = (columns_of(pos, trained=True, shared=which) for which in (False, True))
    # Empty if no parameter is trained.
    parts = {THETA: theta_HN[:, own]} if own or shared else {}
    return parts | ({SHARED_THETA: theta_HN[:1, shared]} if shared else {})


def trained_theta(pos: PositionalEmbedding, parts: Sequence[Tensor]) -> Tensor:
    """Merge the trained parameters of `pos` into one tensor [heads, parameters].

    Args:
        pos: The positional embedding.
        parts: The tensor of the parameters with a value for each head, then the tensor of the
            parameters that all heads share, if there are any.
    """
    if len(parts) == 1:
        return parts[0]
    own_HN, shared_1N = parts
    columns = (columns_of(pos, trained=True, shared=which) for which in (False, True))
    return _joined((own_HN, shared_1N.expand(len(own_HN), -1)), *columns)


def _joined(parts: Sequence[Tensor], first: list[int], second: list[int]) -> Tensor:
    """Merge two tensors into one, with the columns in theta's order.

    Args:
        parts: The two tensors.
        first: The index in theta of each column of `parts[0]`.
        second: The index in theta of each column of `parts[1]`.
    """
    # An index of several numbers would make the host wait for the GPU.
    place = dict(zip([*first, *second], (c for part in parts for c in part.unbind(1)), strict=True))
    return torch.stack([place[n] for n in sorted(place)], dim=1)


def named_theta(pos: PositionalEmbedding, theta_HN: Tensor) -> dict[str, Tensor]:
    """Return the values of the embedding's trained parameters by name, for the log.

    The values of a parameter are [heads], or [1] if all heads share the parameter. If each layer
    has a parameter with this name, the values are [layers, heads] or [layers, 1].

    Args:
        pos: The positional embedding.
        theta_HN: The trained parameters [heads, parameters].
    """
    columns: dict[tuple[str, str], list[Tensor]] = {}
    for parameter, column_H in zip(pos.trained_parameters, theta_HN.T, strict=True):
        of_layer = _LAYER.match(parameter.name)
        owner = pos.of_layer(int(of_layer[1]))[0].name if of_layer else ""
        values = column_H[:1] if parameter.shared else column_H
        columns.setdefault((owner, _LAYER.sub("", parameter.name)), []).append(values)
    if len(columns) > MOST_COLUMNS:  # such as T5's table of buckets
        shared = torch.tensor([p.shared for p in pos.trained_parameters], device=theta_HN.device)
        tables = {"table": theta_HN[:, ~shared]}
        return tables | ({"shared": theta_HN[0, shared]} if shared.any() else {})
    # Several embeddings may have a parameter of the same name. Then the embedding's name and a
    # dot come first.
    times = Counter(name for _, name in columns)
    return {
        name if times[name] == 1 else f"{owner}.{name}": torch.stack(all_H).squeeze(0)
        for (owner, name), all_H in columns.items()
    }


class FixedTheta(nn.Module):
    """The positional embedding's parameters that are not trained, such as ALiBi's slopes.

    These parameters are always stored in fp32.

    Args:
        pos: The positional embedding.
        theta_HN: All initial parameters of `pos` [heads, parameters], trained or not.
    """

    value: Tensor

    def __init__(self, pos: PositionalEmbedding, theta_HN: Tensor):
        super().__init__()
        columns = columns_of(pos, trained=False)
        self.numerics = pos.numerics
        self._bounded = [pos.parameters[n] for n in columns]
        self.register_buffer("value", theta_HN[:, columns].float(), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FixedTheta:
        exact = self.value  # DeepSpeed's cast of the model would round it
        super()._apply(fn, recurse)
        self.value = exact.to(self.value.device)
        return self

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return the parameters that are not trained [heads, parameters], in `dtype`."""
        value_HN = self.numerics.constant(self.value).to(dtype)
        return value_HN if not self._bounded else within_bounds(value_HN, self._bounded)


# Theta has no module of its own, because checkpoints name its parts as the first layer's.
class StoredTheta(nn.Module):
    """Base class of the model's first layer, which stores the positional embedding's parameters.

    Attributes:
        theta: The trained parameters with a value for each head. None if no parameter is trained.
        shared_theta: The trained parameters with one value for all heads. None if no trained
            parameter has one value for all heads.
        fixed_theta: The parameters that are not trained. None if there are no such parameters.
        frozen_N: True for each trained parameter that the user has frozen. None if no parameter is
            frozen.
    """

    frozen_N: Tensor | None

    def __init__(self, plan: Plan):
        super().__init__()
        self.pos, self.tp = plan.pos, plan.tp
        self.theta: nn.Parameter | None = None
        self.shared_theta: nn.Parameter | None = None
        self.fixed_theta: FixedTheta | None = None
        self.register_buffer("frozen_N", None, persistent=False)
        start_HN = initial_theta(plan)
        if parts := divided_theta(plan.pos, start_HN):
            self.theta = nn.Parameter(parts[THETA])
            mark_sharding(self.theta, BY_HEADS, plan.tp)
            if SHARED_THETA in parts:
                self.shared_theta = nn.Parameter(parts[SHARED_THETA])
            frozen = [p.name in plan.theta_frozen for p in plan.pos.trained_parameters]
            self.frozen_N = torch.tensor(frozen) if any(frozen) else None
        if columns_of(plan.pos, trained=False) or (plan.pos.has("distance") and not parts):
            self.fixed_theta = FixedTheta(plan.pos, start_HN)

    @property
    def theta_parts(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters: a tuple of `theta` and `shared_theta`, if they exist."""
        return tuple(part for part in (self.theta, self.shared_theta) if part is not None)

    def theta_in(self, dtype: torch.dtype) -> Tensor | None:
        """Return all positional parameters [heads, parameters] in `dtype`, but at least in fp32.

        Return None if the positional embedding has no parameters.
        """
        wide = torch.promote_types(dtype, torch.float32)
        if self.theta is None:
            return None if self.fixed_theta is None else self.fixed_theta(wide)
        # Never a view, because an engine that shards parameters frees their storage after a layer.
        parts = [self.theta.to(wide, copy=True)]
        if self.shared_theta is not None:  # other ranks have other heads: sum their gradients
            parts.append(copy_to(self.shared_theta.to(wide, copy=True), self.tp))
        theta_HN = trained_theta(self.pos, parts)
        # A frozen column has the gradient 0, so the optimizer does not move it. In a pipeline, the
        # engine expects a gradient of all that is passed between stages.
        if self.frozen_N is not None:
            theta_HN = torch.where(self.frozen_N, theta_HN.detach(), theta_HN)
        if self.fixed_theta is None:
            return theta_HN
        columns = (columns_of(self.pos, trained=which) for which in (True, False))
        return _joined((theta_HN, self.fixed_theta(wide)), *columns)
