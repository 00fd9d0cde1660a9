"""Test that the code reads every field of the configuration, as an attribute of its section.

Reads such as `config.model.norm` are found in the syntax tree, also through local names
(`c = config`, `m = config.model`), and reads of a whole group of keys, such as `keys["fp16"]`.
`READ_OTHERWISE` lists fields that are read in other ways.
"""

import ast
import re
from functools import cache

import pytest

from megatron.config.fields import key_of
from megatron.config.schema import SECTIONS
from tests.helpers.paths import ROOT

INNER = "config/sections/model.py computes inner_width from it, which engine/model_shape.py reads"
READ_OTHERWISE = {
    ("model", "mlp_multiple_of"): INNER,
}
FIELDS = [(name, field) for name, section in SECTIONS.items() for field in section.model_fields]
CLASSES = {"Config": "config", **{section.__name__: name for name, section in SECTIONS.items()}}
ROOMS = ("engine", "evaluation", "generation", "harness", "hub", "plan", "pretraining")
FILES = (path for room in ROOMS for path in (ROOT / "megatron" / room).rglob("*.py"))
SOURCES = sorted([*FILES, *ROOT.glob("*.py")])
TEXTS = {path: path.read_text() for path in SOURCES}


def kind_of(node, names):
    """Return "config", or a section's name, if the expression stands for one of these."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        if node.attr == "config":
            return "config"
        if node.attr in SECTIONS and kind_of(node.value, names) == "config":
            return node.attr
    return None


def local_names(function):
    """Return the local names of a function that stand for the config or one of its sections."""
    names = {"config": "config"}
    arguments = [*function.args.args, *function.args.kwonlyargs]
    annotated = [(each.arg, ast.unparse(each.annotation)) for each in arguments if each.annotation]
    names |= {name: CLASSES[annotation] for name, annotation in annotated if annotation in CLASSES}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=True)
            for name, expression in pairs:
                if isinstance(name, ast.Name) and (kind := kind_of(expression, names)):
                    names[name.id] = kind
    return names


def group_of(section, field):
    """Return `fp16` for a field with the key `fp16.loss_scale`; a key without a dot as it is."""
    return (key_of(SECTIONS[section], field) or "").partition(".")[0]


@cache
def reads(text):
    """Return (section, field) of every attribute that one file reads from a section."""
    found, tree = set(), ast.parse(text)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                found.add((kind_of(node.value, names), node.attr))
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "keys":
                group = getattr(node.slice, "value", None)  # of `config.to_flat_dict()`
                found |= {each for each in FIELDS if group_of(*each) == group}
    return found


def unread(texts):
    found = set().union(*map(reads, texts))
    return [each for each in FIELDS if each not in found and each not in READ_OTHERWISE]


def test_every_field_is_read():
    assert unread(TEXTS.values()) == [], "accepted, but nothing reads them"
    stale = set(READ_OTHERWISE) & set().union(*map(reads, TEXTS.values()))
    assert not stale, "read as an attribute: the reason is not needed"
    assert set(READ_OTHERWISE) <= set(FIELDS)


@pytest.mark.parametrize(
    ("section", "field"),
    [each for each in FIELDS if each not in READ_OTHERWISE],
    ids=lambda name: name,
)
def test_a_field_that_nothing_reads_is_found(section, field):
    """If all reads of a field are removed from the source text, the field is reported."""
    group = group_of(section, field)
    pattern = rf"(?<=\.){field}\b|(?<=\"){field}(?=\")|(?<=keys\[\"){group}(?=\"\])"
    texts = [re.sub(pattern, "removed", text) for text in TEXTS.values()]
    assert (section, field) in unread(texts)
