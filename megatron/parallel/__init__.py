"""Process groups, named random streams, the loss: collectives live here, not in the model."""

from megatron.parallel.groups import Groups, build_groups
from megatron.parallel.loss import token_losses
from megatron.parallel.rng import named_generator, rng_state, set_rng_state

__all__ = [
    "Groups",
    "build_groups",
    "named_generator",
    "rng_state",
    "set_rng_state",
    "token_losses",
]
