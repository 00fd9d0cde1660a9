"""Process groups, cut layers, named random streams, the loss: collectives live here alone."""

from megatron.parallel.collectives import add_partial, collect_from, copy_to, exchange, gather_from
from megatron.parallel.cuts import Cut, cut_of, cuts_of, mark_cut, own_part, whole_of, whole_shape
from megatron.parallel.groups import ALONE, Groups, TensorGroup, build_groups
from megatron.parallel.layers import ColumnLinear, HiddenDropout, RowLinear, VocabEmbedding
from megatron.parallel.loss import token_losses
from megatron.parallel.rng import named_generator, rank_dropout, rng_state, set_rng_state

__all__ = [
    "ALONE",
    "ColumnLinear",
    "Cut",
    "Groups",
    "HiddenDropout",
    "RowLinear",
    "TensorGroup",
    "VocabEmbedding",
    "add_partial",
    "build_groups",
    "collect_from",
    "copy_to",
    "cut_of",
    "cuts_of",
    "exchange",
    "gather_from",
    "mark_cut",
    "named_generator",
    "own_part",
    "rank_dropout",
    "rng_state",
    "set_rng_state",
    "token_losses",
    "whole_of",
    "whole_shape",
]
