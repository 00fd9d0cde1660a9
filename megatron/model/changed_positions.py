"""Copy a trained model's weights into a model with other positional embeddings (a retrofit).

Each term of a layer's embedding, such as `rotary` or `kerple_log`, is kept, added or dropped:

    kept      the layer has the term in both models, with equal options: its weights are copied
    added     its weights start as in a new model or, if `gentle`, at values that change the
              model little
    dropped   its weights are left out

The weights of a term are columns of theta (the parameters of the distance kernels), the position
table of `learned`, and the gates of `forget_gate`. A column that several layers share is kept only
if these layers shared one column in the old model.

Legend: H heads, N columns of theta.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from megatron.model.theta import (
    MOST_COLUMNS,
    SHARED_THETA,
    THETA,
    columns_of,
    is_theta,
    trained_theta,
)
from megatron.parallel.sharding import full_shape, local_slice
from megatron.positional import PositionalEmbedding

TABLE = "embedding.position_embeddings.weight"
"""The name of the position table of `learned` in the model and in checkpoints."""
_GATE = ".attention.gate."


def of_positions(name: str) -> bool:
    """Return whether the weight with this name belongs to the model's positional embedding."""
    return is_theta(name) or name == TABLE or _GATE in name


@dataclass(frozen=True)
class ChangedPositions:
    """The replacement of a trained model's positional embedding by another embedding.

    Attributes:
        old: The embedding with which the weights were trained.
        new: The embedding of the model that receives the weights.
        num_layers: The number of layers of both models.
        length: The training length of the new model, in tokens.
        gentle: Whether added parameters start at values that change the model little.
        given: The names of parameters whose start values the user has set. `gentle` does not change
            these start values.
    """

    old: PositionalEmbedding
    new: PositionalEmbedding
    num_layers: int
    length: int
    gentle: bool = True
    given: Collection[str] = ()

    @cached_property
    def kept(self) -> dict[int, int]:
        """A dict from the new index of each kept parameter to its index in the old embedding."""
        found: dict[int, set[int | None]] = {}
        for layer in range(self.num_layers):
            before = dict(_columns(self.old, layer))
            for key, column in _columns(self.new, layer):
                found.setdefault(column, set()).add(before.get(key))
        # All layers that use the parameter must have had the same embedding before, with one
        # common parameter.
        single = {new: next(iter(olds)) for new, olds in found.items() if len(olds) == 1}
        return {new: old for new, old in single.items() if old is not None}

    @property
    def added(self) -> list[int]:
        """The indices of the new embedding's trained parameters that the old embedding lacks."""
        return [n for n in columns_of(self.new, trained=True) if n not in self.kept]

    def _gentle(self, n: int) -> float | None:
        """Return the start value of the added parameter `n` that changes the model little.

        Return None if the parameter keeps the start value of the new model.
        """
        column = self.new.parameters[n]
        return column.gentle if self.gentle and column.name not in self.given else None

    def lines(self) -> list[str]:
        """Return lines for the log that name the kept, added and dropped embeddings."""
        starts = [(self.new.parameters[n].name, self._gentle(n)) for n in self.added]
        texts = [name if start is None else f"{name} = {start:g}" for name, start in starts]
        columns = ", ".join(texts) if len(texts) <= MOST_COLUMNS else f"{len(texts)} columns"
        return [
            f"positions: {self.old.name} -> {self.new.name}",
            f"  kept: {self._terms(self.new, self.old, True)}, and all other weights",
            f"  added: {self._terms(self.new, self.old, False)}"
            + (f" (theta starts: {columns})" if columns else ""),
            f"  dropped: {self._terms(self.old, self.new, False)}",
        ]

    def _terms(self, one: PositionalEmbedding, other: PositionalEmbedding, shared: bool) -> str:
        """Return a text for the log that names some of the embeddings in `one`.

        Each layer of `one` is compared with the same layer of `other`.

        Args:
            one: The embedding whose parts are named.
            other: The embedding with which `one` is compared.
            shared: True selects the embeddings that `other` also has. False selects the embeddings
                that `other` does not have.
        """
        count = Counter(
            term.name
            for layer in range(self.num_layers)
            for term in terms_of_layer(one, layer)
            if term.kind != "none" and (term in terms_of_layer(other, layer)) == shared
        )
        all_of = self.num_layers
        texts = (x if n == all_of else f"{x} in {n} of {all_of} layers" for x, n in count.items())
        return ", ".join(texts) or "no term"

    @torch.no_grad()
    def set_columns(
        self, parameters: Mapping[str, nn.Parameter], values: Mapping[int, Tensor]
    ) -> None:
        """Write values into columns of the new model's theta, its positional parameters.

        Args:
            parameters: The new model's parameters by name, or this rank's shards of them.
            values: The values of each column, by the column's index in theta. The values are
                [heads], or [1] if all heads share the column.
        """
        for name, shared in ((THETA, False), (SHARED_THETA, True)):
            for i, n in enumerate(columns_of(self.new, trained=True, shared=shared)):
                if name in parameters and n in values:
                    param = parameters[name]
                    full_H1 = values[n][:, None].expand(full_shape(param)[0], 1)
                    param[:, i] = local_slice(param, full_H1)[:, 0]

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Set the start values of the new model's positional parameters.

        Kept parameters get their old values. Added parameters may get values that change the model
        little.

        Args:
            parameters: The new model's parameters by name, or this rank's shards of them.
            weights: The unsharded weights of the old model by name.
        """
        parts = [weights[name] for name in (THETA, SHARED_THETA) if name in weights]
        old_HN = trained_theta(self.old, parts) if parts else torch.empty(0)
        place = {n: i for i, n in enumerate(columns_of(self.old, trained=True))}
        values = {n: torch.tensor([x]) for n in self.added if (x := self._gentle(n)) is not None}
        for n, old in self.kept.items():
            values[n] = old_HN[: 1 if self.new.parameters[n].shared else None, place[old]]
        self.set_columns(parameters, values)
        for name, param in parameters.items() if self.gentle else ():
            if name == TABLE and name not in weights:
                param.zero_()
            elif name.endswith(f"{_GATE}bias") and name not in weights:
                param.fill_(math.log(self.length))  # a gate of about 1 - 1 / length


def terms_of_layer(pos: PositionalEmbedding, layer: int) -> dict[PositionalEmbedding, slice]:
    """Return the positional embeddings of a layer, each with the slice of its parameters."""
    of_layer, columns = pos.of_layer(layer)
    found, start = {}, columns.start or 0
    for term in of_layer.terms:
        found[term] = slice(start, start + len(term.parameters))
        start += len(term.parameters)
    return found


def _columns(
    pos: PositionalEmbedding, layer: int
) -> Iterator[tuple[tuple[PositionalEmbedding, str], int]]:
    """Yield ((embedding, parameter name), index) for each trained parameter of a layer."""
    for term, columns in terms_of_layer(pos, layer).items():
        for n, parameter in enumerate(term.parameters, columns.start):
            if parameter.trained:
                yield (term, parameter.name), n
