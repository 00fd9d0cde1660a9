"""Hold the device functions of a distance kernel, which the Triton kernels call.

`codegen` generates them from a formula. `tabulated` has device functions for a table of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.kernels.hidden_layer import Layer
from megatron.kernels.tile_sizes import Needs


@dataclass(frozen=True)
class DeviceFunctions:
    """The device functions of a distance kernel. The docstring of `codegen` explains the symbols.

    Attributes:
        prepare: Maps (row of theta, its length, scale) to c, the constants of a head.
        evaluate: Maps (s, di, dj, d, c, row) to (y, w, terms), for a tile.
        weighted: Whether there is a factor w.
        zeros, add, finish: Create, update and sum up the accumulators of theta's gradient, which
            have W numbers per query row (see `add_columns`). None if no column has a term.
        num_theta: The number of columns of theta that have a term.
        tabulated: Whether "theta" is a table over distances (see `tabulated`).
        biased: Whether the table contains b.
        source: The generated source text.
        layer: The layer of hidden units, if there is one.
        reads_position: Whether `evaluate` needs `row`.
    """

    prepare: Any
    evaluate: Any
    weighted: bool
    zeros: Any = None
    add: Any = None
    finish: Any = None
    num_theta: int = 0
    tabulated: bool = False
    biased: bool = True
    source: str = field(default="", repr=False)
    layer: Layer | None = None
    reads_position: bool = False

    def needs(self, dropout: bool, terms: bool = False) -> Needs:
        """Return what a call with these device functions needs; see `Needs`."""
        layer = self.layer is not None
        heavy = self.weighted or self.tabulated or self.num_theta > 2 or layer
        return Needs(heavy, dropout, self.num_theta, terms, layer)
