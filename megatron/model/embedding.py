"""Define the model's first layer, which returns the first hidden states x and theta.

x is the sum of token and position vectors. Theta holds the parameters of the distance kernel, a
bias or factor in attention that depends only on the query-key distance. Theta is stored in this
layer. The layer returns theta in at least fp32, and every block reads this returned tensor.
Therefore autograd sums theta's gradient over the blocks in fp32. Under bf16 training the stored
theta is bf16, and the optimizer holds an fp32 master copy of theta.

Legend: B batch, T positions of this rank, S positions of the full sequence, D hidden size, H heads
of this rank, N columns of theta (one for each parameter of a head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

from megatron.model.shape import Plan
from megatron.parallel.collectives import copy_to
from megatron.parallel.layers import HiddenDropout, VocabEmbedding
from megatron.parallel.rng import named_generator
from megatron.parallel.sharding import Sharding, mark_sharding
from megatron.positional import PositionalEmbedding, PositionalError, within_bounds

THETA, SHARED_THETA = "embedding.theta", "embedding.shared_theta"
"""The names of the parameters theta in the model and in checkpoints."""
BY_HEADS = Sharding(0)


def is_theta(name: str) -> bool:
    """Return whether the model parameter `name` belongs to the distance kernel (is theta)."""
    return name.rpartition(".")[2] in ("theta", "shared_theta")


def initial_theta(plan: Plan) -> torch.Tensor:
    """Return the distance kernel's initial parameters theta for this rank's heads, in fp32.

    Theta [heads, parameters] is drawn for all heads of the model and then sliced. Parameters with
    start values in `theta_init` are drawn as well and then overwritten. Therefore the draws of the
    other parameters do not depend on `theta_init`.
    """
    generator = named_generator(plan.seed, THETA)
    theta_HN = plan.pos.initial_theta(plan.shape.block.num_heads, generator)
    for column_H, parameter in zip(theta_HN.unbind(1), plan.pos.parameters, strict=True):
        if parameter.name in plan.theta_init:
            column_H.copy_(torch.tensor(plan.theta_init[parameter.name]))
    return BY_HEADS.slice(theta_HN, plan.tp.rank, plan.tp.size)


def columns_of(pos: PositionalEmbedding, *, trained: bool, shared: bool | None = None) -> list[int]:
    """Return the indices of columns of theta [heads, columns].

    Args:
        trained: True returns only columns that are trained, False only columns that are not.
        shared: True returns only columns that all heads share, False only columns with a value for
            each head. None returns both kinds.
    """
    return [
        n
        for n, parameter in enumerate(pos.parameters)
        if parameter.trained == trained and shared in (None, parameter.shared)
    ]


def trained_theta(pos: PositionalEmbedding, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the trained columns of theta [heads, columns], in the order of the parameters.

    Args:
        parts: The result of the model's `theta_parts`: the columns with a value for each head
            [heads, columns] and, if there are any, the columns that all heads share [1, columns].
    """
    if len(parts) == 1:
        return parts[0]
    own_HN, shared_1N = parts
    theta_HN = torch.cat((own_HN, shared_1N.expand(len(own_HN), -1)), dim=1)
    own, shared = (columns_of(pos, trained=True, shared=which) for which in (False, True))
    return theta_HN[:, sorted(range(theta_HN.shape[1]), key=[*own, *shared].__getitem__)]


class FixedTheta(nn.Module):
    """The distance kernel's parameters that are not trained, such as ALiBi's slopes.

    These parameters move to the model's device, but stay fp32. A plain buffer would be rounded to
    bf16 when DeepSpeed casts the model.

    Args:
        theta_HN: The initial theta [heads, columns], including the trained columns.
    """

    value: torch.Tensor

    def __init__(self, pos: PositionalEmbedding, theta_HN: torch.Tensor):
        super().__init__()
        columns = columns_of(pos, trained=False)
        self.numerics = pos.numerics
        self._bounded = [pos.parameters[n] for n in columns]
        self.register_buffer("value", theta_HN[:, columns].float(), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FixedTheta:
        exact = self.value
        super()._apply(fn, recurse)
        self.value = exact.to(self.value.device)
        return self

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the fixed parameters [heads, parameters] in `dtype`.

        The values are rounded and bounded as the positional embedding requires.
        """
        value_HN = self.numerics.constant(self.value).to(dtype)
        return value_HN if not self._bounded else within_bounds(value_HN, self._bounded)


class EmbeddingLayer(nn.Module):
    """The first layer, which maps tokens [batch, positions] to the pair (x, theta).

    x [batch, positions, hidden size] are the hidden states. theta [heads, parameters] are the
    distance kernel's parameters in at least fp32, or None if there are none. Parameters that all
    heads share are stored once and repeated for each head.

    Inputs of `forward` beside the tokens:
        starts_BS: The position at which each token's document starts [batch, all positions], or
            None if each sequence is one document.
        positions_BT: The position of each token [batch, positions], or None to count from the
            sequence's first token.

    Args:
        words: Whether this layer embeds the tokens. If False, the input is the embedded tokens. In
            a pipeline, a separate layer embeds the tokens.
    """

    frozen_N: torch.Tensor | None

    def __init__(self, plan: Plan, words: bool = True):
        super().__init__()
        self.pos, self.offset, self.tp = plan.pos, plan.shape.position_offset, plan.tp
        self.split, self.documents = plan.split, plan.documents
        shape, pos, tp, hidden = plan.shape, plan.pos, plan.tp, plan.shape.block.hidden_size
        self.word_embeddings: VocabEmbedding | None = None
        self.position_embeddings: nn.Embedding | None = None
        self.theta: nn.Parameter | None = None
        self.shared_theta: nn.Parameter | None = None
        self.fixed_theta: FixedTheta | None = None
        self.register_buffer("frozen_N", None, persistent=False)
        if words:
            self.word_embeddings = VocabEmbedding(shape.vocab_size, hidden, tp)
        if any(term.kind == "input" and term.learnable for term in pos.terms):
            device = torch.get_default_device()
            table = skip_init(nn.Embedding, shape.max_positions, hidden, device=device)
            self.position_embeddings = cast(nn.Embedding, table)
        trained, fixed = (columns_of(pos, trained=which) for which in (True, False))
        start_HN = initial_theta(plan)
        if trained:
            own, shared = (columns_of(pos, trained=True, shared=which) for which in (False, True))
            self.theta = nn.Parameter(start_HN[:, own])
            mark_sharding(self.theta, BY_HEADS, tp)
            self.shared_theta = nn.Parameter(start_HN[:1, shared]) if shared else None
            frozen = [p.name in plan.theta_frozen for p in pos.trained_parameters]
            self.frozen_N = torch.tensor(frozen) if any(frozen) else None
        if fixed or (pos.has("distance") and not trained):
            self.fixed_theta = FixedTheta(pos, start_HN)
        self._order = sorted(range(len(pos.parameters)), key=[*trained, *fixed].__getitem__)
        self.dropout = HiddenDropout(shape.block.hidden_dropout, tp)

    @property
    def theta_parts(self) -> tuple[nn.Parameter, ...]:
        """The distance kernel's trained parameters, as up to two tensors.

        The first has values for each head [heads, parameters]. The second holds the parameters that
        all heads share [1, parameters]. A tensor that does not exist is left out.
        """
        return tuple(part for part in (self.theta, self.shared_theta) if part is not None)

    def forward(
        self,
        x: torch.Tensor,
        starts_BS: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BTD = x if self.word_embeddings is None else self.word_embeddings(x)
        if self.pos.has("input"):
            x_BTD = x_BTD + self._position_vectors(x_BTD, starts_BS, positions_BT)
        return self.dropout(x_BTD), self._theta(x_BTD.dtype)

    def _position_vectors(
        self,
        x_BTD: torch.Tensor,
        starts_BS: torch.Tensor | None,
        positions_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        length = x_BTD.shape[1]
        positions = positions_BT  # [B, T], or [T] if all sequences have the same
        if positions is None:
            positions = self.split.positions(length, x_BTD.device)
        if self.documents is not None and starts_BS is not None:
            restarted_BT = self.documents.positions(starts_BS, positions)
            positions = positions if restarted_BT is None else restarted_BT
        if self.position_embeddings is None:
            return self.pos.table(positions, x_BTD.shape[-1], x_BTD.dtype).to(x_BTD.dtype)
        # At most slices - 1 positions at the end are padding and may lie beyond the table.
        self.require_positions(length * self.split.slices - (self.split.slices - 1))
        table = self.position_embeddings.weight
        rows = (positions + self.offset).clamp(max=table.shape[0] - 1)
        if self.tp.splits_sequence:
            table = copy_to(table, self.tp)  # sums the gradient: other ranks use other rows
        return F.embedding(rows, table)

    def require_positions(self, length: int) -> None:
        """Check that the position table, if there is a trained one, has at least `length` rows.

        Raises:
            PositionalError: The table has fewer rows.
        """
        if self.position_embeddings is None:
            return
        available = self.position_embeddings.num_embeddings - self.offset
        if length > available:
            raise PositionalError(
                f"pos_emb: {self.pos.name} has {available} positions, but a sequence of {length} "
                "came in; raise max_position_embeddings or choose an embedding that extrapolates, "
                "such as kerple_log"
            )

    def _theta(self, dtype: torch.dtype) -> torch.Tensor | None:
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
        return torch.cat((theta_HN, self.fixed_theta(wide)), dim=1)[:, self._order]


def scale_distances(model: nn.Module, scale: float) -> None:
    """Multiply the query-key distances in every layer of `model` by `scale`, from now on."""
    for module in model.modules() if scale != 1.0 else ():
        pos = getattr(module, "pos", None)
        if isinstance(pos, PositionalEmbedding) and pos.has_distances:
            vars(module)["pos"] = pos.scaled(scale)
