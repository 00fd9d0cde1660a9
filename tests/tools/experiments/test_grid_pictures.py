"""Pictures of a grid's results: how many curves they have, in which colours and plots."""

from __future__ import annotations

import pandas as pd

from tests.evaluation.figures import curves_of, names_of, ticks_of
from tools.experiments.grid_pictures import by_length


def drawn(values: dict[str, list[float]], metric: str = "perplexity", seeds: int = 2):
    """Return the plots of a metric at 128, 256, ... tokens, with each seed 1% above the last."""
    rows = [
        {"embedding": name, "seed": seed, "length": 128 * 2**n, "value": value * 1.01**seed}
        for name, by in values.items() for n, value in enumerate(by) for seed in range(seeds)
    ]  # fmt: skip
    return by_length(pd.DataFrame(rows), "embedding", metric, "a title").axes


def test_curves_that_matter_have_a_plot_when_one_explodes():
    both, near = drawn({"rpe": [20, 27], "sinusoidal": [24, 460], "alibi": [21, 20]})
    assert names_of(both) == ["sinusoidal", "rpe", "alibi"]
    assert ticks_of(both.yaxis) == ["20", "50", "100", "200", "500"]
    assert names_of(near) == ["rpe", "alibi"] and near.get_yscale() == "linear"
    assert near.get_title(loc="left") == "The same, without the curves that rise far"
    assert near.get_ylim()[1] < 40
    colours = [{line.get_label(): line.get_color() for line in axes.lines} for axes in (both, near)]
    assert colours[0]["rpe"] == colours[1]["rpe"] != colours[0]["alibi"]
    assert ticks_of(near.xaxis) == ["128", "256"]


def test_one_plot_is_enough_for_curves_that_stay_together():
    [axes] = drawn({"rotary": [20, 40], "alibi": [21, 20]})
    assert names_of(axes) == ["rotary", "alibi"] and axes.get_legend() is None
    [axes] = drawn({"alibi": [0.1, 0.9], "rotary": [0.0, 0.2]}, "exact")
    assert names_of(axes) == ["alibi", "rotary"]


def test_fifteen_curves_are_in_two_plots_the_lowest_first():
    found = drawn({f"e{i}": [20, 20 + i] for i in range(15)}, seeds=1)
    assert [len(curves_of(axes)) for axes in found] == [8, 7]
    assert names_of(found[0])[::-1] == [f"e{i}" for i in range(8)]
    for axes in found:
        looks = {(line.get_color(), line.get_marker()) for line in curves_of(axes)}
        assert len(looks) == len(curves_of(axes)) and axes.get_legend() is None


def test_runs_with_other_lengths_are_drawn_by_increasing_length():
    results = pd.DataFrame(
        [("a", 1, length, 20.0) for length in (512, 8192)]
        + [("b", 1, length, 21.0 + length / 8192) for length in (512, 1024, 8192)],
        columns=["embedding", "seed", "length", "value"],
    )
    [axes] = by_length(results, "embedding", "perplexity", "a title").axes
    for line in curves_of(axes):
        assert list(line.get_xdata()) == sorted(line.get_xdata())
