"""Combine positional embeddings: several in one layer, or different ones in different layers.

The combined embeddings are called terms. In one layer, the biases of all distance kernels are
added, and their factors are multiplied. A term of another kind has the same effect as without the
other terms. Theta contains the columns of all terms side by side. Therefore a model has a single
theta, even if its layers have different embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from megatron.positional.base import NOTHING, Kind, PositionalEmbedding, PositionalError


class Combination(PositionalEmbedding):
    """Several positional embeddings that act together in one layer.

    Args:
        terms: The embeddings.

    Raises:
        PositionalError: There is no embedding, an embedding occurs twice, or two embeddings do not
            work together.
    """

    kind = "none"  # the terms have kinds

    def __init__(self, terms: Sequence[PositionalEmbedding]):
        listed = isinstance(terms, Sequence) and len(terms) > 0
        if not listed or not all(isinstance(term, PositionalEmbedding) for term in terms):
            raise PositionalError(
                "write a list of embeddings: Combination([load('rotary'), load('kerple_log')])"
            )
        super().__init__(terms[0].numerics)
        names = [term.name for term in terms]
        for place, term in enumerate(terms):
            if term.name in names[:place]:
                raise PositionalError(f"{term.name} occurs twice in {' + '.join(names)}")
            same = [other.name for other in terms[:place] if other.kind == term.kind]
            if same and term.kind not in ("distance", "none"):
                raise PositionalError(
                    f"{same[0]} and {term.name} exclude each other: both have the kind {term.kind}"
                )
        # Only the kind `distance` may occur more than once.
        self._terms = tuple(terms)
        self.parameters = tuple(
            replace(parameter, name=f"{term.name}.{parameter.name}")
            for term in terms
            for parameter in term.parameters
        )
        self.tempers_bias = any(term.tempers_bias for term in terms)
        tempered = self.tempers_bias and self.has("distance")
        self.reads_position = tempered or any(term.reads_position for term in terms)
        self._tempered_kernel = self._part("distance", "temperature")
        self._kernel = self._tempered_kernel if tempered else self._part("distance")

    def identity(self) -> tuple[PositionalEmbedding, ...]:
        return self._terms

    @property
    def name(self) -> str:
        return " + ".join(term.name for term in self._terms)

    def scaled(self, distance_scale: float) -> Combination:
        return Combination(_scaled(self._terms, distance_scale))

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.cat([term.initial_theta(num_heads, generator) for term in self._terms], dim=1)

    def bias(self, theta_HN: Tensor, d: Tensor, i: Tensor | None = None) -> Tensor | None:
        parts = self._with_theta(theta_HN)
        if i is None:
            return _joined((term.bias(own_HN, d) for term, own_HN in parts), torch.add)
        bias = _joined((term.bias_at(own_HN, d, i) for term, own_HN in parts), torch.add)
        if bias is None or not self.tempers_bias:
            return bias
        return bias * self.temperature(theta_HN, i)

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor | None:
        values = (term.weight(own_HN, d) for term, own_HN in self._with_theta(theta_HN))
        return _joined(values, torch.mul)

    def weight_at(self, theta_HN: Tensor, d: Tensor, i: Tensor) -> Tensor | None:
        parts = self._with_theta(theta_HN)
        return _joined((term.weight_at(own_HN, d, i) for term, own_HN in parts), torch.mul)

    def temperature(self, theta_HN: Tensor, position: Tensor) -> Tensor:
        term, own_HN = self._only("temperature", theta_HN)
        return term.temperature(own_HN, position)

    def decay(self, gate_BHT: Tensor) -> Tensor:
        (gate,) = (term for term in self._terms if term.kind == "gate")
        return gate.decay(gate_BHT)

    def sink(self, theta_HN: Tensor) -> Tensor:
        term, own_HN = self._only("sink", theta_HN)
        return term.sink(own_HN)

    def turn(
        self, x_BHTE: Tensor, positions_BT: Tensor, rotary_ndims: int | None, base: float
    ) -> Tensor:
        for term in self._terms:
            x_BHTE = term.turn(x_BHTE, positions_BT, rotary_ndims, base)
        return x_BHTE

    def table(self, positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        (term,) = (term for term in self._terms if term.kind == "input")
        return term.table(positions, dim, dtype)

    def _part(self, *kinds: Kind) -> tuple[PositionalEmbedding, list[int]]:
        """Return the combination of all embeddings of these kinds, and its columns of theta.

        The columns are indices into the theta of this object.
        """
        terms, columns, start = [], [], 0
        for term in self._terms:
            if term.kind in kinds:
                terms.append(term)
                columns += range(start, start + len(term.parameters))
            start += len(term.parameters)
        if len(terms) == len(self._terms):
            return self, columns
        if len(terms) == 1:
            return terms[0], columns
        return Combination(terms) if terms else NOTHING, columns

    def kernel_part(
        self, theta_HN: Tensor | None, *, tempered: bool = False
    ) -> tuple[PositionalEmbedding, Tensor | None]:
        kernel, columns = self._tempered_kernel if tempered else self._kernel
        if kernel is self:
            return self, theta_HN
        return kernel, columns_at(theta_HN, columns) if theta_HN is not None and columns else None

    def _with_theta(self, theta_HN: Tensor) -> Iterable[tuple[PositionalEmbedding, Tensor]]:
        """Return a pair for each embedding: the embedding, and its parameters."""
        sizes = [len(term.parameters) for term in self._terms]
        return zip(self._terms, theta_HN.split(sizes, dim=1), strict=True)

    def _only(self, kind: Kind, theta_HN: Tensor) -> tuple[PositionalEmbedding, Tensor]:
        """Return the only embedding of this kind, and its parameters."""
        (found,) = (pair for pair in self._with_theta(theta_HN) if pair[0].kind == kind)
        return found


def columns_at(theta_HN: Tensor, columns: Sequence[int]) -> Tensor:
    """Return some columns of the parameters `theta_HN`, of which there must be at least one."""
    # For a list as an index, the host would wait for the GPU.
    if list(columns) == list(range(columns[0], columns[-1] + 1)):
        return theta_HN[:, columns[0] : columns[-1] + 1]
    return torch.stack([theta_HN[:, n] for n in columns], dim=1)


def _joined(
    values: Iterable[Tensor | None], operation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Combine all values that are not None by an operation. Return None if all are None."""
    present = [value for value in values if value is not None]
    return reduce(operation, present) if present else None


def _scaled(parts: Sequence[PositionalEmbedding], scale: float) -> list[PositionalEmbedding]:
    """Return the embeddings with their distances multiplied by a number.

    Raises:
        PositionalError: No embedding has distances, or an embedding cannot scale its distances.
    """
    scaled = {part: part.scaled(scale) for part in parts if part.has_distances}
    if not scaled:
        raise PositionalError(f"{parts[0].name} depends on no distance that could be scaled")
    return [scaled.get(part, part) for part in parts]


class PerLayer(PositionalEmbedding):
    """The positional embeddings of all layers of a model, if layers differ.

    Args:
        layers: The embedding of each layer.
        own_theta: Whether each layer has its own parameters. If not, layers with equal embeddings
            share their parameters.

    Raises:
        PositionalError: Layers differ, but one of them adds position vectors to token embeddings.
    """

    kind = "none"

    def __init__(self, layers: Sequence[PositionalEmbedding], *, own_theta: bool):
        super().__init__(layers[0].numerics)
        self._layers, self._own_theta = tuple(layers), own_theta
        self._terms = tuple(term for pos in dict.fromkeys(layers) for term in pos.terms)
        self._columns: list[slice] = []
        self._drawn: list[PositionalEmbedding] = []
        known: dict[PositionalEmbedding, slice] = {}
        several = own_theta or len({pos for pos in layers if pos.parameters}) > 1
        parameters = []
        for index, pos in enumerate(layers):
            if pos is not layers[0] and (pos.has("input") or layers[0].has("input")):
                raise PositionalError(
                    f"{pos.name} in layer {index} and {layers[0].name} in layer 0: vectors are "
                    "added to the input of the model, so they cannot differ from layer to layer"
                )
            if own_theta or pos not in known:
                prefix = f"layers.{index}." if several else ""
                known[pos] = slice(len(parameters), len(parameters) + len(pos.parameters))
                parameters += [replace(p, name=prefix + p.name) for p in pos.parameters]
                self._drawn.append(pos)
            self._columns.append(known[pos])
        self.parameters = tuple(parameters)

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(pos.name for pos in self._layers))

    def scaled(self, distance_scale: float) -> PerLayer:
        return PerLayer(_scaled(self._layers, distance_scale), own_theta=self._own_theta)

    def of_layer(self, index: int) -> tuple[PositionalEmbedding, slice]:
        return self._layers[index], self._columns[index]

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.cat([pos.initial_theta(num_heads, generator) for pos in self._drawn], dim=1)

    def table(self, positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._layers[0].table(positions, dim, dtype)
