"""Define the class of a distance kernel's device functions, which the Triton kernels call.

`codegen` generates these functions from a formula. `tabulated` has the functions for a distance
kernel that is given by a table of values.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.kernels.hidden_layer import Layer
from megatron.kernels.tile_sizes import Needs


@dataclass(frozen=True, eq=False)
class DeviceFunctions:
    """The Triton device functions that compute a positional embedding inside an attention kernel.

    A logit is scale * s * w + b. s is the query-key product, and w and b come from the embedding.

    Attributes:
        prepare: The function that computes the constants of a head from the embedding's parameters.
        evaluate: The function that computes the logits of a tile, and the values for their
            derivatives.
        weighted: Whether there is a w. Otherwise w is 1.
        zeros: The function that creates the sums for the gradient of the parameters.
        add: The function that adds a tile to these sums.
        finish: The function that computes the gradient of the parameters from these sums.
        num_theta: The number of parameters per head for which `finish` computes gradients.
        tabulated: Whether b and w are given as a table over query-key distances.
        biased: Whether this table contains b.
        source: The generated source text.
        layer: The layer of hidden units in b, if there is one.
        reads_position: Whether b or w depends on the query's position.
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
        """Return the properties of an attention call on which its kernels' registers depend.

        Args:
            dropout: Whether there is dropout.
            terms: Whether there are documents, a window, a sink or a decay.
        """
        layer = self.layer is not None
        heavy = self.weighted or self.tabulated or self.num_theta > 2 or layer
        return Needs(heavy, dropout, self.num_theta, terms, layer)
