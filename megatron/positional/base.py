"""Define the base class of all positional embeddings.

Each embedding is one class in a file of its own. It has one of these kinds:

- `distance` changes the attention scores by a distance kernel. A distance kernel is a bias b
  (`bias`), a factor w (`weight`), or both. b and w depend on the query-key distance and the
  parameters theta. (If `reads_position` is true, b also depends on the query's position);
- `temperature` multiplies the attention scores by a factor t that depends only on the query's
  position;
- `gate` adds the differences of a decay c to the attention scores. A layer computes c from its
  hidden states;
- `sink` adds a null key with a logit of its own to the softmax;
- `rotary` rotates queries and keys;
- `input` adds a vector to the token embedding;
- `none` does nothing.

Embeddings of different kinds can be combined, see `combination`. The attention logit of query
position i and key position j <= i in head h, at distance d = i - j, is

    s_ij = t_h(i) scale (q_i . k_j) w_h(d) + b_h(d, i) + c_i - c_j

If the temperature sets `tempers_bias`, it multiplies b, too. The bias is added AFTER the
1/sqrt(head size) scaling, as in the released KERPLE code and checkpoints. (Eq. 1 of the paper,
arXiv 2205.09921, adds the bias before the scaling.)

Legend: H heads, N columns of theta, `d` a tensor of distances >= 0, of any shape. A formula gets
`d` in theta's dtype, at least in fp32.
"""

from __future__ import annotations

from inspect import isfunction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics, in_floating_point
from megatron.positional.fixed_value import FixedValue
from megatron.positional.theta_parameter import PositionalError, ThetaParameter, check_parameters
from megatron.suggest import did_you_mean

Kind = Literal["distance", "temperature", "gate", "sink", "rotary", "input", "none"]

KIND_OF: dict[str, Kind] = {
    "bias": "distance", "weight": "distance", "temperature": "temperature", "decay": "gate",
    "sink": "sink", "turn": "rotary", "table": "input",
}  # fmt: skip
"""Maps each method that a subclass may override to the kind that uses it."""


class PositionalEmbedding(FixedValue):
    """Base class of all positional embeddings. Subclasses override the methods of their kind.

    An embedding may change the logits by `bias` and `weight`. These methods are pure torch
    formulas, which never clamp the parameters.

    Attributes:
        numerics: The rules by which the embedding rounds numbers.
    """

    kind: ClassVar[Kind] = "none"
    parameters: tuple[ThetaParameter, ...] = ()
    numerics: Numerics = WIDE
    distance_scale: float = 1.0
    """The factor by which each distance is multiplied before a formula uses it (see `scaled`)."""
    reads_position: bool = False
    """Whether the bias depends on the query's position, too.

    The method `bias` then has a third argument, the positions of the queries."""
    tempers_bias: bool = False
    """Whether the temperature multiplies the bias, too: t (s + b) instead of t s + b."""
    _terms: tuple[PositionalEmbedding, ...] = ()

    def __init__(self, numerics: Numerics = WIDE):
        self.numerics = numerics

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(cls.parameters, property):  # known only of an object
            check_parameters(cls.__name__, cls.parameters)
        for method in {"bias", "weight"} & vars(cls).keys():
            setattr(cls, method, in_floating_point(vars(cls)[method]))
        # A subclass that does not set `kind` gets the kind of the method that it overrides.
        if cls.kind != "none" or "kind" in vars(cls):
            return
        own = [x for x, value in vars(cls).items() if x[0] != "_" and isfunction(value)]
        overridden: list[Kind] = [kind for method, kind in KIND_OF.items() if method in own]
        if overridden:
            cls.kind = overridden[0]
        elif unknown := [name for name in own if not hasattr(PositionalEmbedding, name)]:
            hint = "".join(did_you_mean(name, KIND_OF) for name in unknown)
            raise PositionalError(
                f"{cls.__name__} defines {', '.join(unknown)}, which attention never calls; {hint}"
                f"Override one of {', '.join(KIND_OF)}, or set kind"
            )

    @property
    def terms(self) -> tuple[PositionalEmbedding, ...]:
        """The embeddings that are combined in this object. For a single embedding, only itself."""
        return self._terms or (self,)

    def has(self, kind: Kind) -> bool:
        """Return whether this embedding, or one of `self.terms`, has this kind."""
        return any(term.kind == kind for term in self.terms)

    @property
    def has_distances(self) -> bool:
        """Whether the embedding depends on query-key distances."""
        return self.has("distance") or self.has("rotary")

    def of_layer(self, index: int) -> tuple[PositionalEmbedding, slice]:
        """Return the embedding of a layer, and the slice of the parameters that the layer uses.

        Args:
            index: The number of the layer, counted from 0.
        """
        return self, slice(None)

    def kernel_part(
        self, theta_HN: Tensor | None, *, tempered: bool = False
    ) -> tuple[PositionalEmbedding, Tensor | None]:
        """Return the part of this embedding that is a distance kernel, and the part's parameters.

        Args:
            theta_HN: The embedding's parameters [heads, parameters].
            tempered: Whether the part also contains the temperature.
        """
        kept = self.kind == "distance" or (tempered and self.kind == "temperature")
        return (self, theta_HN) if kept or not self.parameters else (NOTHING, None)

    @property
    def name(self) -> str:
        """The embedding's name for `load`, or the class name if it is not from this project."""
        package, _, module = type(self).__module__.rpartition(".")
        return module if package == __name__.rpartition(".")[0] else type(self).__name__

    def scaled(self, distance_scale: float) -> PositionalEmbedding:
        """Return a copy of this embedding that multiplies every distance by `distance_scale`.

        Raises:
            PositionalError: The embedding has no distances that can be scaled.
        """
        if not self.has_distances:
            raise PositionalError(f"{self.name} depends on no distance that could be scaled")
        # The method `columns` multiplies. A subclass without it must do so itself, or raise an
        # error.
        return self.changed(distance_scale=distance_scale)

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the initial parameters of all heads [num_heads, parameters], in fp32."""
        drawn = [p.scale * torch.rand(num_heads, generator=generator) for p in self.parameters]
        columns = [x_H.clamp(p.low, p.high) for x_H, p in zip(drawn, self.parameters, strict=True)]
        return torch.stack(columns, dim=1) if columns else torch.empty(num_heads, 0)

    @property
    def learnable(self) -> bool:
        """Whether the embedding has anything that training changes."""
        return bool(self.trained_parameters)

    @property
    def trained_parameters(self) -> tuple[ThetaParameter, ...]:
        """The parameters that training changes."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor | None:
        """Return the bias of the logits at the query-key distances `d`, [heads, *d.shape].

        The dtype of the bias is at least fp32. The result is None if the bias is 0 everywhere.
        `theta_HN` [heads, parameters] are the embedding's parameters.
        """
        return None

    def bias_at(self, theta_HN: Tensor, d: Tensor, i: Tensor) -> Tensor | None:
        """Return the `bias` of the logits at query-key distances `d` and query positions `i`.

        Args:
            i: The position of each query in its document. It has as many dimensions as `d`.
        """
        if not self.reads_position:
            return self.bias(theta_HN, d)
        return self.bias(theta_HN, d, i)  # pyright: ignore[reportCallIssue] see `reads_position`

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor | None:
        """Return the factor of the query-key products at the distances `d`, [heads, *d.shape].

        The dtype of the factor is at least fp32. The result is None if the factor is 1 everywhere.
        `theta_HN` [heads, parameters] are the embedding's parameters.
        """
        return None

    def weight_at(self, theta_HN: Tensor, d: Tensor, i: Tensor) -> Tensor | None:
        """Return the product of `weight` and `temperature`, or None if both are always 1.

        `i` are the positions of the queries, in a shape that broadcasts with `d`.
        """
        tempers = self.kind == "temperature"
        return self.temperature(theta_HN, i) if tempers else self.weight(theta_HN, d)

    def temperature(self, theta_HN: Tensor, position: Tensor) -> Tensor:
        """Return the factor of each query's query-key products, [heads, *position.shape].

        The dtype of the factor is at least fp32. `position` are the positions of the queries.

        Raises:
            NotImplementedError: This embedding has no temperature.
        """
        raise NotImplementedError(f"{self.name} has no temperature")

    def decay(self, gate_BHT: Tensor) -> Tensor:
        """Return the decay c [batch, heads, positions] of a forget gate, in fp64.

        c_i - c_j is added to the logit of query i and key j.

        `gate_BHT` is the output of the gate's linear layer.

        Raises:
            NotImplementedError: This embedding has no forget gate.
        """
        raise NotImplementedError(f"{self.name} has no gate")

    def sink(self, theta_HN: Tensor) -> Tensor:
        """Return the logit of each head's attention sink [heads].

        Raises:
            NotImplementedError: This embedding has no attention sink.
        """
        raise NotImplementedError(f"{self.name} has no sink")

    def rotate(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        *,
        offset: int = 0,
        positions_BT: Tensor | None = None,
        rotary_ndims: int | None = None,
        base: float = 10000.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the queries and keys, rotated by their positions if the embedding is rotary.

        Args:
            q_BHTE, k_BHTE: The queries and keys [batch, heads, positions, head size].
            offset: The position of the first query and of the first key.
            positions_BT: The position of each query and key. None means offset, offset + 1 and so
                on.
            rotary_ndims: The number of leading dimensions of each head that rotate. It must be
                even. None rotates all dimensions.
            base: The base of the frequencies. The longest wavelength is about 2 pi base.
        """
        if not self.has("rotary"):
            return q_BHTE, k_BHTE
        if positions_BT is None:
            end = offset + q_BHTE.shape[2]
            positions_BT = torch.arange(offset, end, device=q_BHTE.device)[None]
        return (
            self.turn(q_BHTE, positions_BT, rotary_ndims, base),
            self.turn(k_BHTE, positions_BT, rotary_ndims, base),
        )

    def turn(
        self, x_BHTE: Tensor, positions_BT: Tensor, rotary_ndims: int | None, base: float
    ) -> Tensor:
        """Return queries or keys, rotated by their positions if the embedding is rotary.

        Args:
            x_BHTE: The queries or keys [batch, heads, positions, head size].
            positions_BT: The position of each query or key, whole numbers [batch or 1, positions].
            rotary_ndims: The number of leading dimensions of each head that rotate. None means all.
            base: The base of the frequencies.
        """
        return x_BHTE

    def table(self, positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return fixed position vectors [*positions.shape, dim] to add to token embeddings.

        Raises:
            NotImplementedError: The embedding has no fixed vectors.
        """
        raise NotImplementedError(f"{self.name} has no table of position vectors")

    def columns(self, theta_HN: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        """Return distances and all parameters, in shapes that broadcast together.

        The result is (d, parameter 0, parameter 1, ...), in one dtype of at least fp32.
        """
        theta_HN = theta_HN.to(self.numerics.working_dtype(theta_HN.dtype))
        shape = (-1,) + (1,) * d.dim()
        d = d.to(theta_HN.dtype)
        d = d if self.distance_scale == 1.0 else self.distance_scale * d
        # d is multiplied by the distance scale.
        return d, *(column.view(shape) for column in theta_HN.unbind(1))


NOTHING = PositionalEmbedding()
"""An embedding without any effect. It replaces an embedding that is applied elsewhere."""
