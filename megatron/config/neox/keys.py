"""Every key there is: which field it sets, and what to say to a key that is not known."""

from __future__ import annotations

from megatron.config.errors import did_you_mean, nearest
from megatron.config.fields import key_of, show
from megatron.config.neox.no_effect import NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.neox.spellings import OFFLOAD_KEYS, OWN_KEYS
from megatron.config.schema import SECTIONS

# attribute -> dotted key (None: derived), dotted key -> attribute
KEY_OF: dict[str, str | None] = {
    name: key_of(section, name) for section in SECTIONS.values() for name in section.model_fields
}
FIELD_OF: dict[str, str] = {key: name for name, key in KEY_OF.items() if key}
KNOWN_KEYS = frozenset(FIELD_OF) | OWN_KEYS | frozenset(NO_EFFECT) | frozenset(REFUSED)
# Keys that hold other keys, and keys whose value stays a mapping whatever is in it.
GROUPS = frozenset(key.rpartition(".")[0] for key in KNOWN_KEYS if "." in key) | {"optimizer"}
OPAQUE = OFFLOAD_KEYS | frozenset(NO_EFFECT) | frozenset(REFUSED) | {"pos_emb_options"}

_TOP_LEVEL = frozenset(key.split(".")[0] for key in KNOWN_KEYS)


def _members(group: str) -> set[str]:
    """Keys written directly inside ``group``."""
    inside = (key.removeprefix(group + ".") for key in KNOWN_KEYS if key.startswith(group + "."))
    return {key.split(".")[0] for key in inside}


def unknown_part(key: str) -> str:
    """The key itself, or the mapping around it that is not known already."""
    top = key.partition(".")[0]
    return key if top in _TOP_LEVEL else top


def unknown(key: str, value: object) -> str:
    """What is wrong with a dotted key that is not known, and what was probably meant."""
    top, _, _ = key.partition(".")
    group, _, leaf = key.rpartition(".")
    if key in GROUPS:
        usual = ("enabled", "stage", "type")  # the key that a short form is short for
        examples = sorted(_members(key), key=lambda name: (name not in usual, name))[:3]
        return (
            f"expected a mapping with keys such as {', '.join(examples)}; got {show(value)}; write "
            f"e.g. {key}: {{{examples[0]}: VALUE}}"
        )
    if group in GROUPS:
        members = _members(group)
        listing = "write one of " + ", ".join(sorted(members))
        return f"unknown key in {group}; {did_you_mean(leaf, members, listing)}"
    if top in KNOWN_KEYS and top not in GROUPS:
        return f"{top} takes a plain value, not a mapping; write {top}: VALUE"
    homes = sorted(group for group in GROUPS if f"{group}.{leaf}" in KNOWN_KEYS)
    if homes and not group:
        return f"unknown key; write it inside {homes[0]}"
    match = nearest(top, _TOP_LEVEL)
    return "unknown key; " + (f"did you mean {match}?" if match else "nothing is like it; drop it")
