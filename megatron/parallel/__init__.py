"""Process groups, sharded layers, named random streams, the loss. All collectives are here."""

from megatron.parallel.collectives import add_partial, all_gather, all_to_all, copy_to, gather_from
from megatron.parallel.groups import ALONE, Groups, TensorGroup, build_groups
from megatron.parallel.layers import ColumnLinear, HiddenDropout, RowLinear, VocabEmbedding
from megatron.parallel.loss import token_losses
from megatron.parallel.rng import named_generator, rank_dropout, rng_state, set_rng_state
from megatron.parallel.sequence import SequenceSplit
from megatron.parallel.sharding import (
    Sharding,
    full_shape,
    local_slice,
    mark_sharding,
    sharding_of,
    shardings_of,
    unsharded,
)

__all__ = [
    "ALONE",
    "ColumnLinear",
    "Groups",
    "HiddenDropout",
    "RowLinear",
    "SequenceSplit",
    "Sharding",
    "TensorGroup",
    "VocabEmbedding",
    "add_partial",
    "all_gather",
    "all_to_all",
    "build_groups",
    "copy_to",
    "full_shape",
    "gather_from",
    "local_slice",
    "mark_sharding",
    "named_generator",
    "rank_dropout",
    "rng_state",
    "set_rng_state",
    "sharding_of",
    "shardings_of",
    "token_losses",
    "unsharded",
]
