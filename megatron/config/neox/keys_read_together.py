"""Read the keys that must be read together, because GPT-NeoX has several ways to write one setting.

For example, `fp16.enabled` and `precision` both set the precision. In this module, `out` is the
result of the translation. The functions add values of fields, notes and problems to `out`.
"""

import math
import re
from typing import Any

from megatron.config.choices import LONG_PRECISIONS
from megatron.config.errors import Mark
from megatron.config.fields import flag, is_number, number, show
from megatron.config.neox.translation import Translation
from megatron.config.per_layer import per_layer, problem_of, values_of
from megatron.config.reader import Given
from megatron.config.sections.model import ModelConfig

_PRECISION = {"fp16.enabled", "fp16.type", "bf16.enabled"}


def read_precision(others: dict[str, Given], out: Translation) -> None:
    """Set the precision in `out` from the config keys `precision`, `fp16` and `bf16`.

    Args:
        others: The settings of keys that do not set a field by themselves.
        out: The result of the translation, to which the precision is added.
    """
    # `fp16` is {enabled, type}, and `bf16` is {enabled}. If these keys contradict each other, a
    # problem is added to `out`.
    named: list[tuple[str, str, Mark]] = []  # (precision, key that sets it, place of that key)
    kind = others.get("fp16.type")
    half = "bf16" if kind and kind.value == "bfloat16" else "fp16"
    for key, precision in (("fp16", half), ("bf16", "bf16")):
        given = others.get(f"{key}.enabled")
        if given and out.check(f"{key}.enabled", given, flag):
            named.append((precision, key, given.mark))
    if kind and kind.value not in ("fp16", "bfloat16"):
        text = f"unknown type {show(kind.value)}; write fp16 or bfloat16"
        out.problem(kind.mark, "fp16.type", text)
    elif kind and half == "bf16" and "fp16" not in [key for _, key, _ in named]:
        text = "bfloat16, but fp16.enabled is not true: the published code trains in bf16 "
        text += "nevertheless, gpt-neox does not; write enabled: true, or drop the type"
        out.problem(kind.mark, "fp16.type", text)
    top = out.given.get("precision")
    if top and isinstance(top.value, str):
        precision = top.value.lower()
        named.append((LONG_PRECISIONS.get(precision, precision), "precision", top.mark))
    if len({precision for precision, _, _ in named}) > 1:
        listing = ", ".join(f"{key} at {mark} is {precision}" for precision, key, mark in named)
        text = f"precisions contradict: {listing}; keep one (null takes a key away: -o fp16=null)"
        _, key, mark = named[-1]
        out.problem(mark, key, text)
    elif named:
        out.given["precision"] = Given(named[0][0], named[-1][2])


def _read_save_interval(factor: Given, out: Translation) -> None:
    """Set `save_interval` from `checkpoint_factor`, the other name of this key in GPT-NeoX."""
    interval = out.given.get("save_interval")
    if interval and factor.value != interval.value:
        text = f"{show(factor.value)}, but save_interval at {interval.mark} is "
        text += f"{show(interval.value)}, and they are the same; keep one"
        out.problem(factor.mark, "checkpoint_factor", text)
    else:
        out.given["save_interval"] = factor


def _read_decay(fraction: Given, out: Translation) -> None:
    """Set `lr_decay_iters` from `lr_decay_fraction`, which is a fraction of `train_iters`."""
    iters = out.given.get("train_iters")
    value = out.check("lr_decay_fraction", fraction, number(0, 1, above=True, write="e.g. 0.9"))
    if value and iters and "decay_iters" not in out.given and _is_sane(iters.value):
        out.given["decay_iters"] = Given(max(1, math.floor(iters.value * value)), fraction.mark)


def _is_sane(value: Any) -> bool:
    """Return whether the value is a number between -1e18 and 1e18."""
    # Arithmetic with it cannot fail.
    return is_number(value) and abs(value) < 1e18


def _read_width(given: Given, out: Translation) -> None:
    """Set `intermediate_size` from `expansion_factor`, which is a multiple of `hidden_size`."""
    size, hidden = out.given.get("intermediate_size"), out.given.get("hidden_size")
    factor = out.check("expansion_factor", given, number(0, above=True, write="e.g. 4"))
    if factor and size:
        text = f"excludes intermediate_size at {size.mark}; write only one of them"
        out.problem(given.mark, "expansion_factor", text)
    elif factor and hidden and _is_sane(hidden.value):
        width = int(min(factor, 1e18) * hidden.value)
        out.given["intermediate_size"] = Given(width, given.mark)


def read_vocabulary(out: Translation) -> None:
    """Make `make_vocab_size_divisible_by` in `out` a multiple of `model_parallel_size`."""
    # The new value is the least common multiple of these two keys' values. If the new value differs
    # from the old one, a note is added to `out`.
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


def _read_attention(given: Given, out: Translation) -> None:
    """Check that `attention_config` gives every layer attention over the full sequence."""
    # If not, a problem is added to `out`.
    groups = given.value if isinstance(given.value, list) else [given.value]
    if all(isinstance(each, str) for each in groups):
        groups = [[groups, 1]]  # the types of the layers, one by one
    try:
        checked = per_layer(str)(groups)
    except ValueError:
        checked = ()
    num_layers = out.given["num_layers"].value if "num_layers" in out.given else None
    types, text = sorted(values_of(checked)), None
    if not types:
        text = f"expected [[[types], layers], ...], got {given.value}"
    elif refused := [each for each in types if each not in ("global", "flash")]:
        text = f"attention types {', '.join(refused)} are not built"
    elif isinstance(num_layers, int):
        text = problem_of(checked, num_layers)
    if text:
        write = f"write e.g. [[[global], {num_layers or 'all'}]], or drop it"
        out.problem(given.mark, "attention_config", f"{text}; {write}")
        return
    backend = out.given.get("attention_backend")
    named = f"attention_backend: {backend.value if backend else 'auto'}"
    out.notes.append(
        f"attention_config: {' and '.join(types)} attention covers the full "
        f"sequence, and {named} chooses how it is computed (auto: fused kernels on a GPU)"
    )


def _read_curriculum(given: Given, out: Translation) -> None:
    """Set `curriculum` from `curriculum_learning`, DeepSpeed's schedule of the sequence length.

    Add a problem to `out` unless the schedule changes the length at given steps (`fixed_discrete`).
    """
    key, kind, stages = "curriculum_learning", None, None
    if isinstance(given.value, dict) and not given.value.get("enabled"):
        return
    try:
        kind = given.value.get("curriculum_type", "seqlen"), given.value["schedule_type"]
        schedule = given.value["schedule_config"]
        stages = [*zip([0, *schedule["max_step"]], schedule["difficulty"], strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # reported below
    if kind != ("seqlen", "fixed_discrete") or not stages or "curriculum" in out.given:
        text = "only curriculum_type seqlen with schedule_type fixed_discrete is built, with the "
        text += "lists difficulty and max_step, because the lengths of other schedules do not "
        text += "divide seq_length; write curriculum: [[0, 128], [5000, 512]] instead"
        out.problem(given.mark, key, text)
        return
    out.given["curriculum"] = Given(stages, given.mark)
    out.notes.append(
        f"{key}: curriculum is {[*map(list, stages)]}; GPT-NeoX drops the rest of each sequence, "
        "and here a step reads all of its tokens in shorter sequences"
    )


READ = {
    "checkpoint_factor": _read_save_interval,
    "lr_decay_fraction": _read_decay,
    "expansion_factor": _read_width,
    "attention_config": _read_attention,
    "curriculum_learning": _read_curriculum,
}
"""Maps keys that do not set a field by themselves to the functions that read them."""
KEYS = READ.keys() | _PRECISION
"""The known keys that do not set a field by themselves, and that this file reads."""


def add_notes(out: Translation) -> None:
    """Add notes to `out` about unsaved runs, weights without effect and the name `kerple`.

    `kerple` is the name of `kerple_log` in the code of the paper DAPE. There, each layer has its
    own parameters. In this project, all layers share them by default.
    """
    if "save_interval" in out.given and "save" not in out.given:
        out.notes.append("save_interval: nothing is saved, because `save` names no folder")
    by_size = out.given.get("weight_by_num_documents")
    if by_size and by_size.value is True and "train_data_weights" in out.given:
        out.notes.append("train_data_weights: no effect beside weight_by_num_documents: true")
    # `kerple` is DAPE's name of `kerple_log`. Here, all layers share the parameters by default.
    given = out.given.get("pos_emb")
    if given and "kerple" in re.split(r"\W+", str(given.value).lower()):
        out.notes.append(
            "pos_emb: kerple is DAPE's name of kerple_log (there each layer has its own "
            "parameters, here all layers share them)"
        )
