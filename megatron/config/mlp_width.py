"""Compute the inner width of the MLP as gpt-neox does."""

GATED = ("geglu", "swiglu", "reglu", "glu", "bilinear")
"""The activations that split the output of the MLP's first layer into a value and a gate."""


def inner_width(activation: str, intermediate_size: int, multiple: int) -> int:
    """Return the inner width of the MLP, computed as in gpt-neox.

    The width is `intermediate_size`, or a third of it if the activation has a gate. The width is
    then rounded up to a multiple of `multiple`.

    Args:
        activation: The name of the activation. For example, `swiglu` has a gate.
        intermediate_size: The value of the config key `intermediate_size`.
        multiple: The value of the config key `mlp_multiple_of`.
    """
    gated = activation in GATED
    width = int(intermediate_size * 2 / 3) // 2 if gated else intermediate_size
    return -(-width // multiple) * multiple
