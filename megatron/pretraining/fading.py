"""Fade a rotary embedding out of a model during its first training steps.

The fading takes `steps` training steps. At step n = 1, 2, ..., the rotary embedding multiplies all
positions by f = 1 - (n - 1) / steps. So the angle between query i and key j is f times the angle in
the trained model. After the last of these steps, queries and keys are not rotated.

With f = 1, the model is the trained model. With f = 0, there is no rotation. With a value of f
between 0 and 1, the model uses position interpolation (Chen et al. 2023, arXiv 2306.15595) by the
factor 1 / f. A rotary model adapts to this interpolation within few steps.
"""

from torch import nn

from megatron.engine.training.hooks import Hook
from megatron.model.block import SelfAttention
from megatron.positional import load


class Fading(Hook):
    """A hook that reduces the angles of a rotary embedding to 0 during the first training steps.

    Args:
        model: This rank's part of the model.
        steps: The number of steps until the angles are 0.
    """

    # In step n = 1, 2, ..., the angles are multiplied by 1 - (n - 1) / `steps`. This factor depends
    # only on n, so a resumed run continues the schedule.

    def __init__(self, model: nn.Module, steps: int):
        self.model, self.steps = model, steps

    def begin(self, step: int) -> None:
        """Set the rotary angles to those of step `step`, or to those of step 1 if `step` is 0."""
        # A validation after step `step` may still be due.
        self.before_step(max(step, 1))

    def before_step(self, number: int) -> None:
        fade(self.model, 1 - (number - 1) / self.steps)


def fade(model: nn.Module, factor: float) -> None:
    """Set the scale of the rotary embedding that fades out of `model`.

    The fading embedding rotates the queries and keys of each layer whose own positional embedding
    is not rotary.

    Args:
        factor: The scale of the angles. 0 or a negative value means no rotation.
    """
    rotary = load("rotary").scaled(factor) if factor > 0 else None
    for module in model.modules():
        if isinstance(module, SelfAttention) and not module.pos.has("rotary"):
            module.fading = rotary
