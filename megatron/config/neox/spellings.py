"""Read the keys that must be read together, because GPT-NeoX has several ways to write one setting.

For example, `fp16.enabled` and `precision` both set the precision. Each function `read_*` adds
values of fields, notes and problems to the `Translation` called `out`. The argument `others` holds
the settings of the known keys that do not set a field by themselves.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import Mark, Problem
from megatron.config.fields import Check, FrozenDict, flag, is_number, show, whole_number
from megatron.config.reader import Given
from megatron.config.sections.model import ModelConfig

_size = whole_number(0, write="e.g. 500000000")
_ZERO_OPTIONS: dict[str, Check] = {
    "allgather_partitions": flag,
    "overlap_comm": flag,
    "reduce_scatter": flag,
    "contiguous_gradients": flag,
    "ignore_unused_parameters": flag,
    "stage3_gather_16bit_weights_on_model_save": flag,
    "allgather_bucket_size": _size,
    "reduce_bucket_size": _size,
    "sub_group_size": _size,
    "stage3_max_live_parameters": _size,
    "stage3_max_reuse_distance": _size,
    "stage3_prefetch_bucket_size": _size,
    "stage3_param_persistence_threshold": _size,
}
"""Maps each key of `zero_optimization` that is passed to DeepSpeed to the check of its value."""
_OFFLOAD = ("cpu_offload", "cpu_offload_params", "offload_optimizer", "offload_param")
_ZERO_NO_EFFECT = {
    "load_from_fp32_weights": "resuming always loads the fp32 masters",
    # With round_robin_gradients, DeepSpeed would store the fp32 master weights in another order.
    # DeepSpeed's universal checkpoint format mixes that order up. A run without this key would load
    # the weights in the wrong order without an error.
    "round_robin_gradients": "it orders gradients for offloading to the CPU, which is not built",
}
OFFLOAD_KEYS = frozenset(f"zero_optimization.{key}" for key in _OFFLOAD)
OTHER_KEYS = OFFLOAD_KEYS | {
    "attention_config",
    "checkpoint_factor",
    "expansion_factor",
    "lr_decay_fraction",
    "fp16.enabled",
    "fp16.type",
    "bf16.enabled",
    *(f"zero_optimization.{key}" for key in (*_ZERO_OPTIONS, *_ZERO_NO_EFFECT)),
}
"""The known keys that do not set a field by themselves, and that this file reads."""


@dataclass
class Translation:
    """The result of translating GPT-NeoX's keys.

    Attributes:
        given: Maps the name of a field to its value and the place where the value is written.
        inner: For fields whose values are mappings (such as `theta_init`), maps "FIELD.ENTRY" to
            the place where this entry is written.
        notes: Remarks for the user about accepted keys, for example that a key has no effect.
        problems: The errors in the keys and values.
    """

    given: dict[str, Given] = field(default_factory=dict)
    inner: dict[str, Mark] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, mark: Mark | None, key: str, text: str) -> None:
        self.problems.append(Problem(mark, key, text))

    def note(self, key: str, value: Any, reason: str) -> None:
        """Add a note about a key that has no effect, unless the key's value is false or empty."""
        if value not in (False, None) and value != [] and value != {}:
            self.notes.append(f"{key}: accepted, without effect here ({reason})")

    def check(self, key: str, given: Given, check: Check) -> Any:
        """Return the checked value of a key. If it is invalid, add a problem and return None."""
        try:
            return check(given.value)
        except ValueError as error:
            self.problem(given.mark, key, str(error))


def read_zero(others: dict[str, Given], out: Translation) -> None:
    """Read all keys of zero_optimization except `stage`, which sets a field by itself.

    If zero_optimization is given without `stage`, the stage is 0, as in DeepSpeed.
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
        elif key in _ZERO_NO_EFFECT:
            out.note(full, given.value, _ZERO_NO_EFFECT[key])
        elif key in _ZERO_OPTIONS:
            value = out.check(full, given, _ZERO_OPTIONS[key])
            if value is not None:
                passed[key] = value
                out.inner[f"zero.{key}"] = given.mark
    if not group:
        return
    mark = next(iter(group.values())).mark
    if passed:
        out.given["zero"] = Given(FrozenDict(passed), mark)
    out.given.setdefault("zero_stage", Given(0, mark))


def read_precision(others: dict[str, Given], out: Translation) -> None:
    """Read the precision from `precision`, `fp16: {enabled, type}` and `bf16: {enabled}`.

    If these keys contradict each other, a problem is added to `out`.
    """
    named: list[tuple[str, str, Mark]] = []  # (precision, key that sets it, place of that key)
    fp16, kind, bf16 = (others.get(key) for key in ("fp16.enabled", "fp16.type", "bf16.enabled"))
    for key, given in (("fp16.enabled", fp16), ("bf16.enabled", bf16)):
        if given and out.check(key, given, flag) is None:
            return
    if kind and kind.value not in ("fp16", "bfloat16"):
        text = f"unknown type {show(kind.value)}; write fp16 or bfloat16"
        out.problem(kind.mark, "fp16.type", text)
        return
    is_bfloat16 = kind is not None and kind.value == "bfloat16"
    if kind and is_bfloat16 and not (fp16 and fp16.value):
        text = "bfloat16, but fp16.enabled is not true: the published code trains in bf16 "
        text += "nevertheless, gpt-neox does not; write enabled: true, or drop the type"
        out.problem(kind.mark, "fp16.type", text)
        return
    if fp16 and fp16.value:
        named.append(("bf16" if is_bfloat16 else "fp16", "fp16", fp16.mark))
    if bf16 and bf16.value:
        named.append(("bf16", "bf16", bf16.mark))
    top = out.given.get("precision")
    if top and isinstance(top.value, str):
        precision = top.value.lower()
        named.append(("bf16" if precision == "bfloat16" else precision, "precision", top.mark))
    if len({precision for precision, _, _ in named}) > 1:
        listing = ", ".join(f"{key} at {mark} is {precision}" for precision, key, mark in named)
        text = f"precisions contradict: {listing}; keep one (null takes a key away: -o fp16=null)"
        _, key, mark = named[-1]
        out.problem(mark, key, text)
    elif named:
        precision, _, _ = named[0]
        out.given["precision"] = Given(precision, named[-1][2])


def read_intervals(others: dict[str, Given], out: Translation) -> None:
    """Read `checkpoint_factor` and `lr_decay_fraction`.

    `checkpoint_factor` is GPT-NeoX's name for `save_interval`. `lr_decay_fraction` gives
    `lr_decay_iters` as a fraction of `train_iters`.
    """
    factor, interval = others.get("checkpoint_factor"), out.given.get("save_interval")
    if factor and interval and factor.value != interval.value:
        text = f"{show(factor.value)}, but save_interval at {interval.mark} is "
        text += f"{show(interval.value)}, and they are the same; keep one"
        out.problem(factor.mark, "checkpoint_factor", text)
    elif factor:
        out.given["save_interval"] = factor
    if "save_interval" in out.given and "save" not in out.given:
        out.notes.append("save_interval: nothing is saved, because `save` names no folder")

    fraction, iters = others.get("lr_decay_fraction"), out.given.get("train_iters")
    if not fraction:
        return
    value = fraction.value
    if not is_number(value) or not 0 < value <= 1:
        text = f"expected a number above 0, up to 1, got {show(value)}; write e.g. 0.9"
        out.problem(fraction.mark, "lr_decay_fraction", text)
    elif "decay_iters" not in out.given and iters and _is_sane(iters.value):
        out.given["decay_iters"] = Given(max(1, math.floor(iters.value * value)), fraction.mark)


def _is_sane(value: Any) -> bool:
    """Return whether the value is a number within ±1e18, so that arithmetic with it cannot fail.

    Other values are reported when the fields are validated.
    """
    return is_number(value) and abs(value) < 1e18


def read_width(others: dict[str, Given], out: Translation) -> None:
    """Read `expansion_factor`, which sets intermediate_size as a multiple of hidden_size."""
    given, size = others.get("expansion_factor"), out.given.get("intermediate_size")
    hidden = out.given.get("hidden_size")
    if not given:
        return
    if not is_number(given.value) or not 0 < given.value < math.inf:
        text = f"expected a number above 0, got {show(given.value)}; write e.g. 4"
        out.problem(given.mark, "expansion_factor", text)
    elif size:
        text = f"excludes intermediate_size at {size.mark}; write only one of them"
        out.problem(given.mark, "expansion_factor", text)
    elif hidden and _is_sane(hidden.value):
        width = int(min(given.value, 1e18) * hidden.value)
        out.given["intermediate_size"] = Given(width, given.mark)


def read_vocabulary(out: Translation) -> None:
    """Change `make_vocab_size_divisible_by` so that `model_parallel_size` divides it.

    The new value is the least common multiple of the two. If it differs from the old value, add a
    note. The user should keep the new value in another parallel layout, so that the padded
    vocabulary size stays the same.
    """
    key = "make_vocab_size_divisible_by"
    ranks, given = out.given.get("model_parallel_size"), out.given.get(key)
    multiple = given.value if given else ModelConfig.model_fields[key].default
    if not ranks or not all(type(x) is int and x > 0 for x in (ranks.value, multiple)):
        return
    common = math.lcm(multiple, ranks.value)
    if common != multiple:
        out.given[key] = Given(common, (given or ranks).mark)
        out.notes.append(
            f"{key}: {common} instead of {multiple}, so that model_parallel_size {ranks.value} "
            "divides the vocabulary; keep it to load the run in another layout"
        )


def read_attention(others: dict[str, Given], out: Translation) -> None:
    """Check that `attention_config` gives every layer attention over the full sequence.

    The key sets no field, because another key, `attention_backend`, selects the attention backend.
    """
    given = others.get("attention_config")
    if not given:
        return
    write = "write e.g. [[[global], 12]], or drop it"
    layers = out.given.get("num_layers")
    num_layers = layers.value if layers and isinstance(layers.value, int) else None
    types, count = _attention_types(given.value, num_layers or 0)
    refused = sorted({str(each) for each in types} - {"global", "flash"})
    text = ""
    if not types:
        text = f"expected [[[types], layers], ...], got {given.value}; {write}"
    elif refused:
        text = f"attention types {', '.join(refused)} are not built; {write}"
    elif layers and num_layers is not None and count != num_layers:
        text = f"names {count} layers, but num_layers is {num_layers} ({layers.mark}); {write}"
    if text:
        out.problem(given.mark, "attention_config", text)
        return
    backend = out.given.get("attention_backend")
    named = f"attention_backend: {backend.value if backend else 'auto'}"
    out.notes.append(
        f"attention_config: {' and '.join(sorted(set(types)))} attention covers the full "
        f"sequence, and {named} chooses how it is computed (auto: fused kernels on a GPU)"
    )


def note_dape(out: Translation) -> None:
    """Add a note if `pos_emb` is `kerple`, the name of `kerple_log` in DAPE's code.

    The note warns that DAPE trains separate parameters in each layer, whereas here all layers share
    the parameters by default.
    """
    given = out.given.get("pos_emb")
    if given and "kerple" in re.split(r"\W+", str(given.value).lower()):
        out.notes.append(
            "pos_emb: kerple is DAPE's name of kerple_log (there each layer has its own "
            "parameters, here all layers share them)"
        )


def _attention_types(value: Any, num_layers: int) -> tuple[list[Any], int]:
    """Parse the value of attention_config, for example `[[[global], 12]]`.

    Args:
        value: The value of the key.
        num_layers: The number of layers of the model, which replaces the word `all` in `value`.

    Returns:
        (attention types, number of layers). The types are empty if the value has a wrong form.
    """
    items = value if isinstance(value, list) else [value]
    if all(isinstance(item, str) for item in items):
        return items, len(items)
    types: list[Any] = []
    count = 0
    for item in items:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
            return [], 0
        types += item[0]
        if item[1] == "all":
            count += num_layers
        elif isinstance(item[1], int):
            count += item[1] * len(item[0])
    return types, count
