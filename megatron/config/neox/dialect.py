"""Translate config keys of GPT-NeoX, and of KERPLE's fork of it, into fields of `config/schema.py`.

Each key belongs to one of five groups:

1. keys that set a field by themselves;
2. keys that are read together with other keys (`keys_read_together.py`, `zero.py`);
3. keys without effect (`no_effect.py`);
4. refused keys (`refused.py`);
5. unknown keys.

The values of fields are validated later, by `load_config`.
"""

from megatron.config.neox import keys_read_together, zero
from megatron.config.neox.known_keys import (
    FIELD_OF,
    GROUPS,
    KNOWN_KEYS,
    OPAQUE,
    OTHER_KEYS,
    unknown,
    unknown_name,
)
from megatron.config.neox.no_effect import CHECKS, NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.neox.translation import Translation
from megatron.config.reader import Given, Settings, dotted


def translate(settings: Settings) -> Translation:
    """Translate settings with GPT-NeoX's keys into values of this project's config fields.

    Args:
        settings: The settings of all config files and overrides, already merged.

    Returns:
        The values of the fields, with notes for the user and problems.
    """
    out = Translation()
    for path, given in settings.items():
        if given.again is not None:
            again = f"{dotted(path)}: given again on line {given.again}, with the same value"
            out.notes.append(f"{again} ({given.mark})")
    others = _sort_keys(_by_key(settings), out)
    zero.read_zero(others, out)
    keys_read_together.read_precision(others, out)
    for key, read in keys_read_together.READ.items():
        if key in others:
            read(others[key], out)
    keys_read_together.read_vocabulary(out)
    keys_read_together.add_notes(out)
    return out


def _by_key(settings: Settings) -> dict[str, Given]:
    """Return `settings` as a dict with dotted keys, such as "fp16.enabled"."""
    # A key in `OPAQUE`, such as `theta_init`, keeps its whole mapping as one value.
    by_key: dict[str, Given] = {}
    for path, given in settings.items():
        lengths = (n for n in range(1, len(path)) if dotted(path[:n]) in OPAQUE)
        length = next(lengths, len(path))
        key, inside = dotted(path[:length]), path[length:]
        if not inside:
            by_key[key] = given
            continue
        inner = by_key.setdefault(key, Given({}, given.mark)).value
        for name in inside[:-1]:
            inner = inner.setdefault(name, {})
        inner[inside[-1]] = given.value
    return by_key


def _sort_keys(by_key: dict[str, Given], out: Translation) -> dict[str, Given]:
    """Translate the keys that can be translated alone, and return the keys that cannot.

    A translated key becomes a value of a field, a note or a problem in `out`. The returned keys are
    known, but must be read together with other keys.

    Args:
        by_key: Maps each dotted key to its value and its place.
        out: The result of the translation.
    """
    # Values, notes and problems of the translated keys are added to `out`.
    values = {key: given.value for key, given in by_key.items()}
    others: dict[str, Given] = {}
    reported: set[str] = set()
    for key, given in by_key.items():
        is_empty_group = key in GROUPS and given.value == {}
        if given.value is None and (key in KNOWN_KEYS or key in GROUPS):
            continue  # a key with the value null counts as not given
        if key in FIELD_OF and key not in GROUPS:
            out.given[FIELD_OF[key]] = given
        elif key in NO_EFFECT:
            if key not in CHECKS or out.check(key, given, CHECKS[key]) is not None:
                out.note(key, given.value, NO_EFFECT[key])
        elif key in REFUSED:
            if not REFUSED[key].harmless(given.value, values):
                out.problem(given.mark, key, REFUSED[key].text(given.value))
        elif key in OTHER_KEYS or is_empty_group:
            others[key] = given
        elif (name := unknown_name(key)) not in reported:
            reported.add(name)
            out.problem(given.mark, name, unknown(name, given.value))
    _refuse_both_schedulers(by_key, out)
    return others


def _refuse_both_schedulers(by_key: dict[str, Given], out: Translation) -> None:
    """Add a problem to `out` if two keys demand different learning-rate schedulers."""
    # These keys are `override_lr_scheduler` and `use_checkpoint_lr_scheduler`.
    name, other = "override_lr_scheduler", "use_checkpoint_lr_scheduler"
    if all(key in by_key and by_key[key].value is True for key in (name, other)):
        text = f"excludes {other}, but both are true; write only one of them"
        out.problem(by_key[name].mark, name, text)
