"""Runs that cannot go on: numbers that are no longer finite, gradients that fp16 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.engine.errors import DivergedError

if TYPE_CHECKING:
    import deepspeed

MEND = (
    "the newest checkpoint is untouched. Lower the learning rate, lengthen the warm-up, or set "
    "gradient_clipping"
)
_REFUSES = "loss scale already at minimum"  # DeepSpeed's bare Exception under ZeRO


@contextmanager
def least_scale_told(engine: deepspeed.DeepSpeedEngine, step: int) -> Iterator[None]:
    """Around training step `step`: the end of fp16's loss scaling.

    Under ZeRO the engine raises where a step overflows at the least scale; without ZeRO it would
    leave out every step from then on, in silence.

    Raises:
        DivergedError: the gradients overflow at the least loss scale.
    """
    scaling = getattr(engine.optimizer, "loss_scale_config", None)  # without ZeRO
    least = scaling and scaling.dynamic_loss_scale and scaling.cur_scale == scaling.min_loss_scale
    try:
        yield
    except Exception as error:
        if _REFUSES not in str(error):
            raise
    else:
        if not (least and engine.optimizer.overflow):
            return
    scale = engine.optimizer.loss_scale
    lower = ", lower min_loss_scale" if scale > 1 else ""
    raise DivergedError(
        f"fp16: the gradients overflow at step {step} even at the least loss scale, {scale:g}, so "
        f"no step can be taken any more; {MEND}{lower}, or train a new run in bf16, which does not "
        "overflow (bf16: {enabled: true}; `finetune: true` takes this run's weights)"
    )
