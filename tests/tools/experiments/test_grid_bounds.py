"""Test that a grid of more cells than anybody runs is refused before its cells are built."""

from __future__ import annotations

import pytest
import yaml

from tools import sweep
from tools.experiments import grid


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
