"""Write docs/configuration.md, the reference of all config keys, from the schema.

    python docs/site/reference.py

The description of a key is the comment at its field in `megatron/config/sections/`. The accepted
values are copied from the error message for a wrong value of the key.
"""

import ast
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron import files
from megatron.config.fields import key_of
from megatron.config.neox.no_effect import NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.neox.zero import OFFLOAD_KEYS, SWITCH_KEYS
from megatron.config.schema import SECTIONS
from megatron.config.sections.base import Section
from megatron.templates import render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
# Maps keys that have no field of their own to the text in the column `read as` of the page.
_TOGETHER = {
    "fp16.enabled fp16.type bf16.enabled": "`precision`",
    "checkpoint_factor": "`save_interval`",
    "curriculum_learning": "`curriculum`, if `schedule_type` is `fixed_discrete`",
    "lr_decay_fraction": "`lr_decay_iters`, as a fraction of `train_iters`",
    "expansion_factor": "`intermediate_size`, as a multiple of `hidden_size`",
    "attention_config": "a check that every layer is `global` or `flash`; no choice of a backend",
    " ".join(sorted(OFFLOAD_KEYS)): "a check that nothing is offloaded, which is not built",
    " ".join(sorted(SWITCH_KEYS)): "sizes and switches for DeepSpeed",
}


def main() -> None:
    """Write docs/configuration.md."""
    files.write_text(PAGE, page())


def page() -> str:
    """Return the text of docs/configuration.md."""
    return render(
        Path(__file__).with_name("configuration.md.j2"),
        {"rows": _rows, "grouped": _grouped},
        sections=SECTIONS,
        other={key: (text,) for keys, text in _TOGETHER.items() for key in keys.split()},
        refused={key: (each.reason, each.instead) for key, each in REFUSED.items()},
        unused={key: (reason,) for key, reason in NO_EFFECT.items()},
    )


def meanings(section: type[Section]) -> dict[str, str]:
    """Return the meaning of each field of a section: the comment on it in the source code."""
    lines = inspect.getsource(section).splitlines()
    [tree] = ast.parse("\n".join(lines)).body
    found = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)):
        above = node.lineno - 1
        while lines[above - 1].strip().startswith("#"):
            above -= 1
        last = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode()
        texts = [line.strip().lstrip("# ") for line in [*lines[above : node.lineno - 1], last]]
        found[ast.unparse(node.target)] = " ".join(filter(None, texts))
    return found


def _rows(section: type[Section]) -> list[tuple[str, ...]]:
    texts = meanings(section)
    return [
        (f"`{key}`", _default(info), _values(section, name), texts[name])
        for name, info in section.model_fields.items()
        if (key := key_of(section, name))
    ]


def _default(info: FieldInfo) -> str:
    """Return the default of a field as YAML, or a word if the field has no default value.

    The word is `required` if the user must set the field. It is `derived` for a number that is
    computed from other fields, and otherwise `none`.
    """
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "derived" if info.annotation in (int, float) else "none"
    return "`" + json.dumps(value).strip('"') + "`"


def _values(section: type[Section], name: str) -> str:
    """Return a text that describes which values the field `name` accepts.

    The text is copied from the error message for a wrong value.
    """
    try:
        section.__pydantic_validator__.validate_assignment(section.model_construct(), name, object)
    except ValidationError as error:
        found = re.search("expected (?:one of )?(.*), got", error.errors()[0]["msg"])
        return found[1] if found else "a mapping"
    raise AssertionError(f"{name} accepts everything")


def _grouped(notes: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Group keys that have the same notes, and return one row of the page for each group."""
    # The first entry of a row names all keys of the group. The other entries are the notes.
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, note in notes.items():
        keys.setdefault(note, []).append(f"`{key}`")
    return [(", ".join(same), *note) for note, same in keys.items()]


if __name__ == "__main__":
    main()
