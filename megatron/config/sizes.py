"""Refuse sizes that no machine's memory can hold, before a job allocates anything."""

from __future__ import annotations

from typing import Any

from megatron.config.layouts import Found, relation
from megatron.config.per_layer import values_of

MOST_LAYERS = 100_000
MOST_NUMBERS = 10**13
"""A model may have at most this many parameters, and a layer at most this many activations."""
MOST_SAMPLES = 10**11
"""A run may read at most this many training samples, because their order must fit into memory."""


@relation(
    "num_layers",
    "hidden_size",
    "make_vocab_size_divisible_by",
    "pos_emb",
    "max_position_embeddings",
    "rpe_num_buckets",
)
def _parameters(
    layers: int, hidden: int, vocabulary: int, pos_emb: Any, rows: int, buckets: int
) -> Found | None:
    if layers > MOST_LAYERS:
        return "num_layers", f"{layers} is above {MOST_LAYERS:,}; write a smaller number"
    terms = {term for name in values_of(pos_emb) for term in name.split(" + ")}
    tables = {
        "make_vocab_size_divisible_by": vocabulary * hidden,
        "max_position_embeddings": rows * hidden if "learned" in terms else 0,
        "rpe_num_buckets": buckets if "rpe" in terms else 0,
    }
    for name, count in {"hidden_size": 12 * layers * hidden**2, **tables}.items():
        if count > MOST_NUMBERS:
            text = f"{count:.1e} parameters follow from it, and at most {MOST_NUMBERS:.0e} are"
            return name, f"{text} possible; write a smaller number"
    return None


@relation("train_batch_size", "seq_length", "seq_length_val", "hidden_size")
def _activations(batch: int, length: int, length_val: int, hidden: int) -> Found | None:
    for name, tokens in (("seq_length", length), ("seq_length_val", length_val)):
        if max(tokens * hidden, tokens * batch) > MOST_NUMBERS:
            text = f"{tokens} with hidden_size {hidden} and train_batch_size {batch} fits into no"
            return name, f"{text} machine's memory; write smaller sizes"
    return None


@relation("train_iters", "train_batch_size")
def _samples(steps: int, batch: int) -> Found | None:
    if steps * batch > MOST_SAMPLES:
        text = f"{steps} x train_batch_size {batch} are {steps * batch:.1e} samples, and at most"
        return "train_iters", f"{text} {MOST_SAMPLES:.0e} are possible; write a smaller number"
    return None
