"""Compute the config fields that follow from other fields and from the number of processes."""

from collections.abc import Iterator

from megatron.config.rules.batch import derive_batch_sizes
from megatron.config.rules.parallel_layout import derive_data_parallel_size
from megatron.config.rules.relation import Found, Values


def derive(values: Values, world_size: int) -> Iterator[Found]:
    """Compute the config fields that depend on other fields, and yield the problems.

    A problem is a pair (field name, error text).

    Args:
        values: Maps the names of fields to their values. It is changed in place. Fields with
            invalid values are missing.
        world_size: The number of processes.
    """
    # For example, it is a problem if the train batch size is not a multiple of the data-parallel
    # size.
    defaults = {
        "num_kv_heads": values.get("num_attention_heads"),
        "seq_length_val": values.get("seq_length"),
        "max_position_embeddings": values.get("seq_length"),
        "momentum": 0.95 if values.get("type") == "muon" else 0.0,
    }
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if hidden and heads and hidden % heads == 0:
        defaults["head_dim"] = hidden // heads
    if {"hidden_size", "activation"} <= set(values):
        factor = 8 if values["activation"] == "geglu" else 4
        defaults["intermediate_size"] = factor * values["hidden_size"]
    if "train_iters" in values:
        defaults["decay_iters"] = max(1, values["train_iters"])
    for name, default in defaults.items():
        if values.get(name, 0) is None:
            values[name] = default
    values["world_size"] = world_size
    yield from derive_data_parallel_size(values)
    yield from derive_batch_sizes(values)
