"""GPT-NeoX's keys, both dialects (KERPLE's and gpt-neox's), -> the fields of the schema.

Here keys are sorted into fields, keys that are read together (``spellings``), keys without effect,
refused and unknown ones. Values are checked later, field by field.
"""

from __future__ import annotations

from typing import Any

from megatron.config.errors import Mark
from megatron.config.neox.keys import (
    FIELD_OF,
    GROUPS,
    KNOWN_KEYS,
    OPAQUE,
    OWN_KEYS,
    unknown,
    unknown_part,
)
from megatron.config.neox.no_effect import KEPT_NO_EFFECT, NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.neox.spellings import (
    Translation,
    read_attention,
    read_intervals,
    read_positional,
    read_precision,
    read_zero,
)
from megatron.config.reader import Given, Settings, dotted


def translate(settings: Settings) -> Translation:
    """Settings of all sources, merged -> what each field is given."""
    out = Translation()
    own = _sort_keys(settings, out)
    read_zero(own, out)
    read_precision(own, out)
    read_intervals(own, out)
    read_positional(out)
    read_attention(own, out)
    return out


def _sort_keys(settings: Settings, out: Translation) -> dict[str, Given]:
    """Fields go to ``out.given``; the rest of the known keys is returned, dotted."""
    rest: dict[str, Given] = {}
    grouped: dict[str, dict[str, Any]] = {}  # opaque mappings, put together again
    marks: dict[str, Mark] = {}
    for path, given in settings.items():
        cut = next((n for n in range(1, len(path)) if dotted(path[:n]) in OPAQUE), None)
        if cut is None:
            rest[dotted(path)] = given
            continue
        inner = grouped.setdefault(dotted(path[:cut]), {})
        for part in path[cut:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = given.value
        marks.setdefault(dotted(path[:cut]), given.mark)
    rest.update({key: Given(value, marks[key]) for key, value in grouped.items()})

    flat = {key: given.value for key, given in rest.items()}
    own: dict[str, Given] = {}
    reported: set[str] = set()
    for key, given in rest.items():
        if given.value is None and (key in KNOWN_KEYS or key in GROUPS):
            continue  # null: as if not given
        if key in FIELD_OF and not (key in GROUPS and given.value == {}):
            _field(key, given, out)
        elif key in NO_EFFECT:
            out.note(key, given.value, NO_EFFECT[key])
        elif key in REFUSED:
            refusal = REFUSED[key]
            if not refusal.harmless(given.value, flat):
                out.problem(given.mark, key, refusal.text(given.value))
        elif key in OWN_KEYS or (key in GROUPS and given.value == {}):
            own[key] = given
        elif (name := unknown_part(key)) not in reported:
            reported.add(name)
            out.problem(given.mark, name, unknown(name, given.value))
    return own


def _field(key: str, given: Given, out: Translation) -> None:
    name = FIELD_OF[key]
    if key in GROUPS:
        out.problem(given.mark, key, unknown(key, given.value))
        return
    out.given[name] = given
    if name in KEPT_NO_EFFECT:
        out.note(key, given.value, KEPT_NO_EFFECT[name])
