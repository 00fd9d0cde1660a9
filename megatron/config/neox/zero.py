"""Read the config key `zero_optimization`, whose sizes and switches are passed to DeepSpeed."""

from typing import Any

from megatron.config.fields import Check, FrozenDict, flag, whole_number
from megatron.config.neox.translation import Translation
from megatron.config.reader import Given

_FLAGS = """
    allgather_partitions overlap_comm reduce_scatter contiguous_gradients ignore_unused_parameters
    stage3_gather_16bit_weights_on_model_save
"""
_SIZES = """
    allgather_bucket_size reduce_bucket_size sub_group_size stage3_max_live_parameters
    stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold
"""
# The keys of `zero_optimization` that are passed to DeepSpeed, each with a check of its value.
_OPTIONS: dict[str, Check] = {
    **dict.fromkeys(_FLAGS.split(), flag),
    **dict.fromkeys(_SIZES.split(), whole_number(0, write="e.g. 500000000")),
    "reduce_bucket_size": whole_number(1, write="e.g. 500000000"),
}
_OFFLOAD = ("cpu_offload", "cpu_offload_params", "offload_optimizer", "offload_param")
_NO_EFFECT = {
    "load_from_fp32_weights": "resuming always loads the fp32 masters",
    # With round_robin_gradients, DeepSpeed would store the fp32 master weights in another order.
    # DeepSpeed's universal checkpoint format mixes that order up. A run without this key would load
    # the weights in the wrong order without an error.
    "round_robin_gradients": "it orders gradients for offloading to the CPU, which is not built",
}
OFFLOAD_KEYS = frozenset(f"zero_optimization.{key}" for key in _OFFLOAD)
SWITCH_KEYS = frozenset(f"zero_optimization.{key}" for key in (*_OPTIONS, *_NO_EFFECT))


def read_zero(others: dict[str, Given], out: Translation) -> None:
    """Read DeepSpeed's ZeRO settings in `zero_optimization`, and add them to `out`.

    Args:
        others: Maps dotted keys to settings. Keys outside `zero_optimization` are ignored.
        out: The result of the translation.
    """
    group = {k.partition(".")[2]: g for k, g in others.items() if k.startswith("zero_optimization")}
    passed: dict[str, Any] = {}
    for key, given in group.items():
        full = f"zero_optimization.{key}"
        if key in _OFFLOAD:
            device = given.value.get("device") if isinstance(given.value, dict) else given.value
            if device not in (False, "none", "None", {}, None):
                text = "offloading to the CPU is not built yet; write false or drop it"
                out.problem(given.mark, full, text)
        elif key in _NO_EFFECT:
            out.note(full, given.value, _NO_EFFECT[key])
        elif key in _OPTIONS:
            value = out.check(full, given, _OPTIONS[key])
            if value is not None:
                passed[key] = value
                out.inner[f"zero.{key}"] = given.mark
    # As in DeepSpeed, the stage is 0 if it is not given.
    if group:
        mark = next(iter(group.values())).mark
        out.given.setdefault("zero_stage", Given(0, mark))
        if passed:
            out.given["zero"] = Given(FrozenDict(passed), mark)
