"""Hold the device functions of a distance kernel, which the Triton kernels call.

`codegen` generates them from a formula. `tabulated` has device functions for a table of values.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.kernels.hidden_layer import Layer
from megatron.kernels.tile_sizes import Needs


@dataclass(frozen=True)
class DeviceFunctions:
    """The Triton device functions that compute an embedding's bias and factor.

    The docstring of `codegen` has the formulas. Theta are the parameters of bias and factor.

    Attributes:
        prepare: Maps (a pointer to a head's row of theta, the length of the row, scale) to c, the
            constants of the head.
        evaluate: Maps (s, di, dj, d, c, row) to (y, w, terms) for a tile. s are the query-key
            products. The query-key distances are given twice, as d and as di - dj. The argument
            `row` contains the queries' positions. y is the logit divided by scale, and w is the
            factor of s. Each term belongs to one column of theta. `add` and `finish` compute
            theta's gradient from the terms.
        weighted: Whether there is a factor w.
        zeros, add, finish: Create, update and sum up the accumulators of theta's gradient. The
            accumulators have W numbers per query row (see `add_columns`). The functions are None if
            no column has a term.
        num_theta: The number of columns of theta that have a term.
        tabulated: Whether a table over distances takes the place of theta (see `tabulated`).
        biased: Whether the table contains the bias.
        source: The generated source text.
        layer: The layer of hidden units in the bias, if there is one.
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
        """Return the properties of an attention call that determine how many registers it needs.

        Args:
            dropout: Whether there is dropout.
            terms: Whether there are documents, a window, a sink or a decay.
        """
        layer = self.layer is not None
        heavy = self.weighted or self.tabulated or self.num_theta > 2 or layer
        return Needs(heavy, dropout, self.num_theta, terms, layer)
