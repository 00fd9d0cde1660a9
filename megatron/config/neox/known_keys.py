"""List the known config keys, map them to the fields that they set, and explain unknown keys."""

from megatron.config.fields import key_of, show
from megatron.config.neox.keys_read_together import KEYS
from megatron.config.neox.no_effect import NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.neox.zero import OFFLOAD_KEYS, SWITCH_KEYS
from megatron.config.schema import SECTIONS
from megatron.suggest import did_you_mean

KEY_OF: dict[str, str | None] = {
    name: key_of(section, name) for section in SECTIONS.values() for name in section.model_fields
}
"""Maps each field to its dotted key, or to None if the field is always derived."""
FIELD_OF: dict[str, str] = {key: name for name, key in KEY_OF.items() if key}
"""Maps each dotted key that sets a field to that field."""
OTHER_KEYS = KEYS | OFFLOAD_KEYS | SWITCH_KEYS
"""The known keys that do not set a field by themselves."""
KNOWN_KEYS = frozenset(FIELD_OF) | OTHER_KEYS | frozenset(NO_EFFECT) | frozenset(REFUSED)
# GROUPS are keys that contain other known keys. The values of OPAQUE keys may be mappings, whose
# inner keys are not looked up.
GROUPS = frozenset(key.rpartition(".")[0] for key in KNOWN_KEYS if "." in key) | {"optimizer"}
OPAQUE = (
    OFFLOAD_KEYS
    | frozenset(NO_EFFECT)
    | frozenset(REFUSED)
    | {"curriculum_learning", "pos_emb_options", "rope_scaling", "task_options", "theta_init"}
)

_TOP_LEVEL = frozenset(key.split(".")[0] for key in KNOWN_KEYS)


def _members(group: str) -> set[str]:
    """Return the known keys inside the mapping `group`, without the group's name.

    For example, `enabled` is a known key inside `fp16`.
    """
    inside = (key.removeprefix(group + ".") for key in KNOWN_KEYS if key.startswith(group + "."))
    return {key.split(".")[0] for key in inside}


def unknown_name(key: str) -> str:
    """Return the part of an unknown dotted `key` that the error message names."""
    # If the part before the first dot is a known key, return `key`. Otherwise, return only this
    # part.
    top = key.partition(".")[0]
    return key if top in _TOP_LEVEL else top


def unknown(key: str, value: object) -> str:
    """Return the error text for an unknown dotted key. If a known key is similar, suggest it.

    Args:
        key: The unknown key.
        value: The value of the unknown key.
    """
    top, _, _ = key.partition(".")
    group, _, leaf = key.rpartition(".")
    if key in GROUPS:
        usual = ("enabled", "stage", "type")  # the keys that a plain value most likely means
        examples = sorted(_members(key), key=lambda name: (name not in usual, name))[:3]
        return (
            f"expected a mapping with keys such as {', '.join(examples)}; got {show(value)}; write "
            f"e.g. {key}: {{{examples[0]}: VALUE}}"
        )
    if group in GROUPS:
        members = sorted(_members(group))
        inner = [each for each in KNOWN_KEYS if each.startswith(f"{group}.")]
        deeper = next((f"write {each}" for each in inner if each.endswith(f".{leaf}")), "")
        listing = "write one of " + ", ".join(members)
        hint = deeper or did_you_mean(leaf, members).rstrip() or listing
        return f"unknown key in {group}; {hint}"
    if top in KNOWN_KEYS and top not in GROUPS:
        return f"{top} takes a plain value, not a mapping; write {top}: VALUE"
    homes = sorted(group for group in GROUPS if f"{group}.{leaf}" in KNOWN_KEYS)
    if homes and not group:
        return f"unknown key; write it inside {homes[0]}"
    hint = did_you_mean(top, _TOP_LEVEL).rstrip()
    return f"unknown key; {hint or 'no known key is similar; drop it'}"
