"""Compute the width of the MLP, and refuse sizes that no machine's memory can hold."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.layouts import Found, relation
from megatron.config.per_layer import values_of

GATED = ("geglu", "swiglu", "reglu", "glu", "bilinear")
"""The activations that split the output of the MLP's first layer into a value and a gate."""
MOST_LAYERS = 100_000
MOST_NUMBERS = 10**13
"""A model may have at most this many parameters, and a layer at most this many activations."""
MOST_SAMPLES = 10**11
"""A run may read at most this many training samples, because their order must fit into memory."""


def inner_width(activation: str, intermediate_size: int, multiple: int) -> int:
    """Return the inner width of the MLP, computed as in gpt-neox.

    It is `intermediate_size`, or a third of it if the activation has a gate (such as `swiglu`),
    rounded up to a multiple of `multiple`.

    Args:
        activation: The name of the activation.
        intermediate_size: The value of the config key `intermediate_size`.
        multiple: The value of the config key `mlp_multiple_of`.
    """
    width = intermediate_size
    if activation in GATED:
        width = int(width * 2 / 3) // 2
    return -(-width // multiple) * multiple


@relation("activation", "intermediate_size", "mlp_multiple_of", "model_parallel_size")
def _inner_width(activation: str, intermediate: int, multiple: int, ranks: int) -> Found | None:
    width = inner_width(activation, intermediate, multiple)
    if width == 0:
        text = f"{intermediate} x 2/3 / 2 leaves the MLP no inner width ({activation})"
        return "intermediate_size", f"{text}; write at least 3"
    if width % ranks:
        text = f"{ranks} does not divide the inner width {width} of the MLP ({activation})"
        return "model_parallel_size", f"{text}; write mlp_multiple_of: {math.lcm(multiple, ranks)}"
    return None


@relation(
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "make_vocab_size_divisible_by",
    "pos_emb",
    "max_position_embeddings",
    "rpe_num_buckets",
)
def _parameters(
    layers: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    pos_emb: Any,
    rows: int,
    buckets: int,
) -> Found | None:
    if layers > MOST_LAYERS:
        return "num_layers", f"{layers} is above {MOST_LAYERS:,}; write a smaller number"
    terms = {term for name in values_of(pos_emb) for term in name.split(" + ")}
    tables = {
        "make_vocab_size_divisible_by": vocabulary * hidden,
        "max_position_embeddings": rows * hidden if "learned" in terms else 0,
        "rpe_num_buckets": buckets if "rpe" in terms else 0,
    }
    tables["intermediate_size"] = layers * hidden * intermediate
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
