"""Fade a rotary embedding out of a model during its first training steps.

At step n = 1, 2, ... of `steps`, positions are multiplied by f = 1 - (n - 1) / steps before they
rotate queries and keys; after `steps`, nothing rotates. So the angle between query i and key j is
f times that of the trained model. f = 1 is the trained model, f = 0 is no rotation at all, and
each f between is the position interpolation of Chen et al. 2023 (arXiv 2306.15595) by the factor
1 / f, to which a rotary model adapts within few steps.
"""

from torch import nn

from megatron.engine.training.hooks import Hook
from megatron.model.block import SelfAttention
from megatron.positional import load


class Fading(Hook):
    """A hook that reduces the angles of rotary embeddings to 0 over the first steps.

    Args:
        model: This rank's part of the trained model.
        steps: The number of steps until the angles are 0.
    """

    # In step n = 1, 2, ..., the angles are multiplied by 1 - (n - 1) / `steps`. This factor depends
    # only on n, so a resumed run continues the schedule.

    def __init__(self, model: nn.Module, steps: int):
        self.model, self.steps = model, steps

    def begin(self, step: int) -> None:
        """Use the angles of step `step`."""
        # A validation after this step may still be due.
        self.before_step(max(step, 1))

    def before_step(self, number: int) -> None:
        fade(self.model, 1 - (number - 1) / self.steps)


def fade(model: nn.Module, factor: float) -> None:
    """Rotate queries and keys by scaled rotary angles in layers without a rotary embedding.

    Args:
        factor: The scale of the angles. 0 or a negative value means no rotation.
    """
    rotary = load("rotary").scaled(factor) if factor > 0 else None
    for module in model.modules():
        if isinstance(module, SelfAttention) and not module.pos.has("rotary"):
            module.fading = rotary
