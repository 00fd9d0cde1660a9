"""Test the reader: scalars, JSON in YAML, duplicates, merging, overrides, line numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import load_config
from megatron.config.reader import Settings, merge, read_file, read_override, scalar

WORDS = ["num_layers", "hidden_size", "fp16", "optimizer", "params", "lr", "a_b_c", "x"]


def write(directory: Path, text: str, name: str = "file.yml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def plain(settings: Settings) -> dict[tuple[str, ...], Any]:
    return {path: given.value for path, given in settings.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("1E5", 1e5),
        ("1e-08", 1e-8),
        ("2.0e-5", 2e-5),
        ("+.5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0x10", 16),
        ("1_000", 1000),
        ("-3", -3),
        (".inf", float("inf")),
        ("True", True),
        ("false", False),
        ("off", False),
        ("None", None),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("949,50,1", "949,50,1"),
        ("1.0e_8", "1.0e_8"),
        ("e5", "e5"),
        ("kerple_log", "kerple_log"),
    ],
)
def test_scalars(text: str, value: Any, tmp_path: Path) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)
    settings, problems = read_file(write(tmp_path, f"key: {text}\n"))
    assert not problems
    assert plain(settings) == {("key",): value}


def test_quoted_text_stays_text(tmp_path: Path) -> None:
    settings, _ = read_file(write(tmp_path, "{'a': '6e-4', \"b\": \"true\"}"))
    assert plain(settings) == {("a",): "6e-4", ("b",): "true"}


def test_json_in_yaml_with_lines(tmp_path: Path) -> None:
    text = '# top\n{\n\t"num-layers": 3, # of them\n\t"fp16": {\n\t\t"enabled": True,\n\t},\n}\n'
    settings, problems = read_file(write(tmp_path, text))
    assert not problems
    assert plain(settings) == {("num_layers",): 3, ("fp16", "enabled"): True}
    assert settings["num_layers",].mark.line == 3
    assert settings["fp16", "enabled"].mark.line == 5


@pytest.mark.parametrize(
    "text",
    [
        "a_b: 1\na-b: 2\n",
        "a_b: 1\na_b: true\n",
        '{"a-b": 1,\n "a_b": 2}',
        "o:\n  x: 1\na_b: 1\na_b: 2\n",
        "fp16: {enabled: true}\nfp16.enabled: false\n",
        "zero_optimization.stage: 2\nzero_optimization: {stage: 0}\n",
    ],
)
def test_duplicate_keys(text: str, tmp_path: Path) -> None:
    _, problems = read_file(write(tmp_path, text))
    assert len(problems) == 1
    last = text.rstrip().count("\n") + 1
    assert problems[0].mark.line == last
    assert f"first on line {last - 1}" in problems[0].text


@pytest.mark.parametrize("text", ["a_b: 1\na-b: 1\n", "a_b: {x: 1}\na_b: {x: 1}\n"])
def test_a_duplicate_key_with_the_same_value_is_marked(text: str, tmp_path: Path) -> None:
    settings, problems = read_file(write(tmp_path, text))
    assert not problems and [given.again for given in settings.values()] == [2]


def test_duplicate_nested_key(tmp_path: Path) -> None:
    _, problems = read_file(write(tmp_path, "optimizer:\n  params: {lr: 1}\n  params: {}\n"))
    assert [str(p.mark).endswith(":3") and p.key for p in problems] == ["optimizer.params"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("a: 1\n b: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("- 1\n- 2\n", 1, "expected `key: value` lines"),
        ("just text", 1, "expected `key: value` lines"),
        ("a: 1\n[1]: 2\n", 2, "a key must be plain text"),
        ("a: 1\nb: [{[1]: 2}]\n", 2, "a key must be plain text"),
        ("a: 1\nb: !!python/name:os.system x\n", 2, "tag"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("a: &x [*x]\n", 1, "nested too deeply"),
    ],
)
def test_broken_files_say_where(text: str, line: int, what: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    _, problems = read_file(path)
    assert len(problems) == 1
    assert what in problems[0].text
    if problems[0].mark.line is not None:
        assert problems[0].mark.line == line


def test_aliases_cannot_explode(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    _, problems = read_file(write(tmp_path, "\n".join(lines)))
    assert any("YAML aliases expand to more than" in problem.text for problem in problems)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00a")
    for name, what in (
        ("none.yml", "no such file"),
        ("binary.yml", "UTF-8"),
        ("", "cannot be read"),
    ):
        _, problems = read_file(tmp_path / name)
        assert [what in problem.text for problem in problems] == [True]


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "\ufeffnum_layers: 1\n"])
def test_empty_files_and_a_byte_order_mark(text: str, tmp_path: Path) -> None:
    settings, problems = read_file(write(tmp_path, text))
    assert not problems
    assert set(plain(settings).values()) <= {1}


def test_overrides() -> None:
    for text, expected in {
        "train-iters=100": {("train_iters",): 100},
        "optimizer.params.lr=1e-3": {("optimizer", "params", "lr"): 1e-3},
        "eval_lengths=[128, 256]": {("eval_lengths",): [128, 256]},
        "split=949,50,1": {("split",): "949,50,1"},
        "fp16={enabled: True}": {("fp16", "enabled"): True},
        "data_path=a=b": {("data_path",): "a=b"},
        "save=": {("save",): None},
        'save="runs/try #2"': {("save",): "runs/try #2"},
        "save=runs/try#2": {("save",): "runs/try#2"},
        'task_options={"a": "b #2"}': {("task_options", "a"): "b #2"},
    }.items():
        settings, problems = read_override(text)
        assert (plain(settings), problems) == (expected, [])


@pytest.mark.parametrize(
    "text", ["train_iters", "=3", "a..b=1", "x=[1", "x=1\ny: 2", "save=runs/try #2", "save=#2"]
)
def test_bad_overrides(text: str) -> None:
    _, problems = read_override(text)
    assert len(problems) == 1
    assert str(problems[0]).startswith(f"-o {text}: ")


values = st.one_of(st.integers(-9, 9), st.booleans(), st.text("ab", max_size=3), st.just([1, 2]))
trees = st.dictionaries(
    st.sampled_from(WORDS),
    st.one_of(values, st.dictionaries(st.sampled_from(WORDS), values, min_size=1, max_size=3)),
    max_size=5,
)


def nested_update(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = nested_update(base[key], value) if both else value
    return result


@given(trees, trees)
def test_an_overlay_is_a_dict_update(tmp_path_factory: Any, first: dict, second: dict) -> None:
    directory = tmp_path_factory.mktemp("overlay")

    def read(tree: dict) -> Settings:
        settings, problems = read_file(write(directory, json.dumps(tree)))
        assert not problems
        return settings

    merged = merge(read(first), read(second))
    assert plain(merged) == plain(read(nested_update(first, second)))
    flat = {k: v for k, v in first.items() if not isinstance(v, dict)}
    other = {k: v for k, v in second.items() if not isinstance(v, dict)}
    assert plain(merge(read(flat), read(other))) == plain(read({**flat, **other}))


@given(trees, st.randoms(use_true_random=False))
def test_dash_and_underscore_are_the_same(tmp_path_factory: Any, tree: dict, random: Any) -> None:
    directory = tmp_path_factory.mktemp("dash")

    def respell(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        spelled = {}
        for key, value in node.items():
            letters = ("-" if c == "_" and random.random() < 0.5 else c for c in key)
            spelled["".join(letters)] = respell(value)
        return spelled

    one, _ = read_file(write(directory, json.dumps(tree)))
    two, _ = read_file(write(directory, json.dumps(respell(tree))))
    assert plain(one) == plain(two)


@pytest.mark.parametrize(
    "text",
    ["fp16.enabled: true\nfp16: null\n", "fp16: true\nfp16.enabled: false\n",
     "fp16: true\nfp16.enabled: true\n", "optimizer.params.lr: 1\noptimizer: {params: 2}\n"],
)  # fmt: skip
def test_a_value_and_a_mapping_of_one_name(text: str, tmp_path: Path) -> None:
    _, (problem,) = read_file(write(tmp_path, text))
    assert problem.mark.line == 2 and "both as one value and as a mapping" in problem.text


def test_a_dotted_key_of_a_file_is_a_nested_key(tmp_path: Path, base: Path) -> None:
    settings, problems = read_file(write(tmp_path, "fp16.enabled: true\na: {b.c: 1}\n"))
    assert not problems and list(settings) == [("fp16", "enabled"), ("a", "b.c")]
    config = write(tmp_path, base.read_text() + "fp16.enabled: true\n")
    assert load_config([config]).training.precision == "fp16"
    assert load_config([config], ["fp16=null"]).training.precision == "fp32"
