"""Values that GPT-NeoX spells in several ways, or that are part of a mapping.

Each ``read_*`` takes the known keys that are no field (``own``, by dotted key) and writes what a
field is given, or a problem, into a :class:`Translation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import Mark, Problem
from megatron.config.fields import FrozenDict, flag, show, whole
from megatron.config.neox.aliases import resolve
from megatron.config.reader import Given

# Remaining zero_optimization keys, which DeepSpeed's engine is given.
_ZERO_FLAGS = frozenset(
    (
        "allgather_partitions",
        "overlap_comm",
        "reduce_scatter",
        "contiguous_gradients",
        "ignore_unused_parameters",
        "stage3_gather_16bit_weights_on_model_save",
    )
)
_ZERO_SIZES = frozenset(
    (
        "allgather_bucket_size",
        "reduce_bucket_size",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
)
_OFFLOAD = ("cpu_offload", "cpu_offload_params", "offload_optimizer", "offload_param")
_ZERO_NO_EFFECT = {
    "load_from_fp32_weights": "resuming always loads the fp32 masters",
    # With it DeepSpeed would keep the masters in an order that its universal format confuses, and
    # that a run without it loads in silence.
    "round_robin_gradients": "it orders gradients for offloading to the CPU, which is not built",
}
OFFLOAD_KEYS = frozenset(f"zero_optimization.{key}" for key in _OFFLOAD)
OWN_KEYS = OFFLOAD_KEYS | {
    "attention_config",
    "checkpoint_factor",
    "lr_decay_fraction",
    "fp16.enabled",
    "fp16.type",
    "bf16.enabled",
    *(f"zero_optimization.{key}" for key in (*_ZERO_FLAGS, *_ZERO_SIZES, *_ZERO_NO_EFFECT)),
}


@dataclass
class Translation:
    """``given`` by attribute name, with the notes and problems met on the way.

    ``inner`` marks the entries of an attribute that is a mapping, as ``attribute.entry``.
    """

    given: dict[str, Given] = field(default_factory=dict)
    inner: dict[str, Mark] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, mark: Mark | None, key: str, text: str) -> None:
        self.problems.append(Problem(mark, key, text))

    def note(self, key: str, value: Any, reason: str) -> None:
        """Notes a key without effect, unless its value asks for nothing."""
        if value not in (False, None) and value != [] and value != {}:
            self.notes.append(f"{key}: accepted, without effect here ({reason})")


def read_zero(own: dict[str, Given], out: Translation) -> None:
    """zero_optimization: DeepSpeed's stage is 0 where the mapping names none."""
    group = {k.partition(".")[2]: g for k, g in own.items() if k.startswith("zero_optimization")}
    passed: dict[str, Any] = {}
    mark: Mark | None = None
    for key, given in group.items():
        full = f"zero_optimization.{key}"
        mark = mark or given.mark
        if key in _OFFLOAD:
            device = given.value.get("device") if isinstance(given.value, dict) else given.value
            if device not in (False, "none", "None", {}, None):
                out.problem(
                    given.mark,
                    full,
                    "offloading to the CPU is not built yet; write false or drop it",
                )
        elif key in _ZERO_NO_EFFECT:
            out.note(full, given.value, _ZERO_NO_EFFECT[key])
        elif key in _ZERO_FLAGS or key in _ZERO_SIZES:
            check = flag if key in _ZERO_FLAGS else whole(0, write="e.g. 500000000")
            try:
                passed[key] = check(given.value)
                out.inner[f"zero.{key}"] = given.mark
            except ValueError as error:
                out.problem(given.mark, full, str(error))
    if passed and mark:
        out.given["zero"] = Given(FrozenDict(passed), mark)
    if group and mark and "zero_stage" not in out.given:
        out.given["zero_stage"] = Given(0, mark)


def read_precision(own: dict[str, Given], out: Translation) -> None:
    """``precision``, ``fp16: {enabled, type}`` and ``bf16: {enabled}`` must not contradict."""
    said: list[tuple[str, str, Mark]] = []  # (precision, key that says so, where)
    enabled, kind = own.get("fp16.enabled"), own.get("fp16.type")
    bf16 = own.get("bf16.enabled")
    for key, given in (("fp16.enabled", enabled), ("bf16.enabled", bf16)):
        if given and not isinstance(given.value, bool):
            out.problem(given.mark, key, f"expected true or false, got {show(given.value)}")
            return
    if kind and kind.value not in ("fp16", "bfloat16"):
        out.problem(
            kind.mark, "fp16.type", f"unknown type {show(kind.value)}; write fp16 or bfloat16"
        )
        return
    if kind and kind.value == "bfloat16" and not (enabled and enabled.value):
        out.problem(
            kind.mark,
            "fp16.type",
            "bfloat16, but fp16.enabled is not true: the published code trains in bf16 all the "
            "same, gpt-neox does not; write enabled: true, or drop the type",
        )
        return
    if enabled and enabled.value:
        is_bf16 = kind is not None and kind.value == "bfloat16"
        said.append(("bf16" if is_bf16 else "fp16", "fp16", enabled.mark))
    if bf16 and bf16.value:
        said.append(("bf16", "bf16", bf16.mark))
    top = out.given.get("precision")
    if top and isinstance(top.value, str):
        named = {"bfloat16": "bf16"}.get(top.value.lower(), top.value.lower())
        said.append((named, "precision", top.mark))
    if len({precision for precision, _, _ in said}) > 1:
        listing = ", ".join(f"{key} at {mark} says {precision}" for precision, key, mark in said)
        out.problem(
            said[-1][2],
            said[-1][1],
            f"precisions contradict: {listing}; keep one (null takes a key away: -o fp16=null)",
        )
    elif said:
        out.given["precision"] = Given(said[0][0], said[-1][2])


def read_intervals(own: dict[str, Given], out: Translation) -> None:
    """checkpoint_factor is gpt-neox's save_interval; lr_decay_fraction a share of train_iters."""
    factor, interval = own.get("checkpoint_factor"), out.given.get("save_interval")
    if factor and interval and factor.value != interval.value:
        out.problem(
            factor.mark,
            "checkpoint_factor",
            f"{show(factor.value)}, but save_interval at {interval.mark} is "
            f"{show(interval.value)}, and they are the same; keep one",
        )
    elif factor:
        out.given["save_interval"] = factor
    if "save_interval" in out.given and "save" not in out.given:
        out.notes.append("save_interval: nothing is saved, because `save` names no folder")

    fraction, iters = own.get("lr_decay_fraction"), out.given.get("train_iters")
    if not fraction:
        return
    value = fraction.value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        text = f"expected a number above 0, up to 1, got {show(value)}; write e.g. 0.9"
        out.problem(fraction.mark, "lr_decay_fraction", text)
    elif "decay_iters" not in out.given and iters and isinstance(iters.value, (int, float)):
        out.given["decay_iters"] = Given(max(1, math.floor(iters.value * value)), fraction.mark)


def read_positional(out: Translation) -> None:
    """A published name becomes a file name and options; options given by hand win."""
    given = out.given.get("pos_emb")
    if not given:
        return
    try:
        name, options = resolve(given.value)
    except ValueError:
        return  # the field's own check says so
    out.given["pos_emb"] = Given(name, given.mark)
    own = out.given.get("pos_emb_options")
    if options and (own is None or isinstance(own.value, dict)):
        merged = {**options, **(own.value if own else {})}
        out.given["pos_emb_options"] = Given(merged, own.mark if own else given.mark)


def read_attention(own: dict[str, Given], out: Translation) -> None:
    """attention_config: only attention over the whole sequence, which ``auto`` computes best."""
    given = own.get("attention_config")
    if not given:
        return
    layers = out.given.get("num_layers")
    write = "write e.g. [[[global], 12]], or drop it"
    types: list[Any] = []
    count = 0
    items = given.value if isinstance(given.value, list) else [given.value]
    if all(isinstance(item, str) for item in items):
        types, count = items, len(items)
    else:
        for item in items:
            if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
                text = f"expected [[[types], layers], ...], got {given.value}; {write}"
                out.problem(given.mark, "attention_config", text)
                return
            types += item[0]
            if item[1] == "all" and layers and isinstance(layers.value, int):
                count += layers.value
            elif isinstance(item[1], int):
                count += item[1] * len(item[0])
    bad = sorted({str(t) for t in types} - {"global", "flash"})
    if bad:
        text = f"attention types {', '.join(bad)} are not built; {write}"
        out.problem(given.mark, "attention_config", text)
    elif layers and isinstance(layers.value, int) and count != layers.value:
        text = f"names {count} layers, but num_layers is {layers.value} ({layers.mark}); {write}"
        out.problem(given.mark, "attention_config", text)
    else:
        backend = out.given.get("attention_backend")
        named = f"attention_backend: {backend.value if backend else 'auto'}"
        out.notes.append(
            f"attention_config: {' and '.join(sorted(set(types)))} attention is over the whole "
            f"sequence, and {named} chooses how it is computed (auto: fused kernels on a GPU)"
        )
