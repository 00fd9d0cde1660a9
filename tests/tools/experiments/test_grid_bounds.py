"""Test what a grid file may contain: how many cells, which names of axes, which kinds of values."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml

from megatron.config import ConfigError
from tools import sweep
from tools.experiments import description, grid, moved_theta, state

NO_TEXT = " is not a text; write it in quotes"


def test_a_grid_of_too_many_cells_is_refused_at_once(tmp_path, capsys, monkeypatch):
    axes = {f"axis{n}": [str(value) for value in range(60)] for n in range(6)}
    content = {"runs": "runs", "configs": ["x.yml"], "axes": axes, "seeds": [1], "lengths": [16]}
    path = tmp_path / "grid.yml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        sweep.main([str(path), "--list"])
    assert "axes: give more than 10,000 cells" in capsys.readouterr().err
    monkeypatch.setattr(grid, "MOST_CELLS", 120)
    path.write_text(yaml.safe_dump(content | {"axes": {"a": axes["axis0"], "b": ["1", "2"]}}))
    assert len(grid.read_grid(path).cells) == 120


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("data/B\u00fc_{s}", "data/B\u00fc_1"),
        ("{s}", "1"),
        ({"a": ["{s}", 'x "q" {s}', None]}, '{"a": [1, x "q" 1, null]}'),
        ("B\u00fc", '"B\\u00fc"'),
    ],
)
def test_names_in_overrides_are_replaced_by_their_values(value, text):
    assert grid.yaml_line(value, {"s": "1"}) == text


def refusal(tmp_path, **changes):
    content = {"runs": "runs", "configs": ["x.yml"], "axes": {"e": ["a", "b"]}, "seeds": [1]}
    path = tmp_path / "grid.yml"
    path.write_text(yaml.safe_dump(content | {"lengths": [16]} | changes))
    with pytest.raises(ConfigError) as refused:
        grid.read_grid(path)
    return [str(problem).partition(": ")[2] for problem in refused.value.problems]


def test_an_axis_is_not_named_like_another_column(tmp_path):
    """Such an axis would be lost in `cells.csv`, or stop the table after all runs were trained."""
    cell = grid.Cell("a", {}, 1, (), (), tmp_path / "a", 1)
    columns = {*state.write_index([cell], tmp_path), *state.code(), "seeds"}
    columns |= {*moved_theta.of_runs(pd.DataFrame(columns=description.COLUMNS))[0]}
    for name in columns:
        found = refusal(tmp_path, axes={name: ["a", "b"]})
        assert found == [f"axes.{name}: {name} is another column of the results; rename the axis"]


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"axes": {"e": [True, "b", None]}},
            ["axes.e.0: True" + NO_TEXT, "axes.e.2: None" + NO_TEXT],
        ),
        (
            {"axes": {"e": {"a": {"sedes": [1]}}}},
            ["axes.e.a.sedes: unknown key, did you mean seeds?"],
        ),
        (
            {"endpoints": {"P": {"clam": "below", "of": {}, "than": {}}}},
            [
                "endpoints.P.claim: Field required",
                "endpoints.P.clam: unknown key, did you mean claim?",
            ],
        ),
        (
            {"endpoints": {"P": [{"claim": "below", "of": {"e": True}, "than": {}}]}},
            ["endpoints.P.0.of.e: True" + NO_TEXT],
        ),
        (
            {"axes": {"e": 5, "f": [True]}},
            [
                *(f"axes.e: Input should be a valid {kind}" for kind in ("list", "dictionary")),
                "axes.f.0: True" + NO_TEXT,
            ],
        ),
    ],
)  # fmt: skip
def test_each_fault_is_told_once_and_where_it_is(tmp_path, changes, problems):
    assert refusal(tmp_path, **changes) == problems
