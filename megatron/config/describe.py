"""A configuration as text for people, and as the flat mapping it can be loaded from again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from megatron.config.fields import key_of
from megatron.config.neox.no_effect import KEPT_NO_EFFECT
from megatron.config.reader import scalar

if TYPE_CHECKING:
    from megatron.config.schema import Config

# Follows from the other batch sizes: left out of the flat form, so that a run of another number of
# processes keeps its train_batch_size.
_FOLLOWS = {"gradient_accumulation_steps"}


def to_flat_dict(config: Config) -> dict[str, Any]:
    """Flat NeoX keys (nested where NeoX nests); fields that are None are left out."""
    flat: dict[str, Any] = {}
    for _, section in config.sections():
        for name, info in type(section).model_fields.items():
            key, value = key_of(type(section), name), getattr(section, name)
            if key is None or value is None or name in _FOLLOWS:
                continue
            if name in KEPT_NO_EFFECT and value == info.default:
                continue
            *groups, leaf = key.split(".")
            inner = flat
            for group in groups:
                inner = inner.setdefault(group, {})
            if isinstance(value, Mapping):
                inner.setdefault(leaf, {}).update(value)
            else:
                inner[leaf] = list(value) if isinstance(value, tuple) else value
    # The fp16 mapping only carries the loss-scaling values; `precision` decides.
    flat["fp16"]["enabled"] = config.training.precision == "fp16"
    if flat["precision"] == "bf16":
        flat["precision"] = "bfloat16"
    return flat


class _Dumper(yaml.SafeDumper):
    """Quotes the text that our reader, unlike PyYAML's, would take for a number or null."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def to_yaml(config: Config) -> str:
    """The flat form as a YAML file."""
    return yaml.dump(to_flat_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def derived(config: Config) -> list[str]:
    """What follows from the values, each with its arithmetic."""
    m, b, p, t = config.model, config.batch, config.parallel, config.training
    tokens = b.train_batch_size * m.seq_length
    lines = [
        f"data-parallel size {p.data_parallel_size} = {p.world_size} process(es) / "
        f"({p.pipe_parallel_size} pipe x {p.model_parallel_size} model"
        + (f" x {p.context_parallel_size} context)" if p.context_parallel_size > 1 else ")"),
        f"train_batch_size {b.train_batch_size} = {b.train_micro_batch_size_per_gpu} micro x "
        f"{b.gradient_accumulation_steps} accumulation x {p.data_parallel_size} data-parallel",
        f"tokens a step {tokens:,} = {b.train_batch_size} x {m.seq_length}; "
        f"in all {tokens * t.train_iters:,}",
        f"head size {m.hidden_size // m.num_attention_heads} = "
        f"{m.hidden_size} / {m.num_attention_heads}",
        f"warm-up {config.lr.warmup * config.lr.decay_iters:g} iterations = "
        f"{config.lr.warmup:g} x {config.lr.decay_iters}",
    ]
    if t.train_iters == 0:
        lines.append("train_iters is 0: nothing is trained, only evaluated")
    return lines


def describe(config: Config, origins: Mapping[str, str]) -> str:
    """Sections with every value and its origin, what was derived, the notes."""
    lines = ["configuration from " + (", ".join(config.sources) or "overrides only")]
    for title, section in config.sections():
        lines.append(f"\n{title}")
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            key = key_of(type(section), name)
            default = info.get_default(call_default_factory=True)
            origin = "default" if key and value == default else "derived"
            rows = {key or name: value}
            if isinstance(value, Mapping):
                rows = {f"{key}.{inner}": each for inner, each in value.items()}
            for row, each in rows.items():
                inner = f"{name}.{row.rpartition('.')[2]}"
                where = origins.get(inner) or origins.get(name, origin)
                lines.append(f"  {row:<46} {_show(each):<24} {where}")
    lines += ["\nderived", *(f"  {line}" for line in derived(config))]
    if config.notes:
        lines += ["\nnotes", *(f"  {note}" for note in config.notes)]
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
