"""The style of all pictures: what a figure has, whatever it shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from megatron import pictures
from tests.evaluation.figures import names_of

# Machado, Oliveira and Fernandes (2009): how dichromats see linear RGB.
BLIND = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def figure_with(ends: list[float]):
    curves = [pictures.Curve(f"curve {n}", [1, 2], [0.0, end]) for n, end in enumerate(ends)]
    return pictures.by_length("model, data, day", [curves], "length", "loss")


@pytest.mark.parametrize("kind", BLIND)
def test_no_two_colours_look_the_same_to_the_colour_blind(kind):
    with pictures.in_style():
        colours = [to_rgb(each["color"]) for each in matplotlib.rcParams["axes.prop_cycle"]]
    assert len(colours) == pictures.MOST_LINES
    seen = np.clip(np.array(colours) ** 2.2 @ np.transpose(BLIND[kind]), 0, 1) ** (1 / 2.2)
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.11


def test_names_are_in_the_order_of_the_ends_and_do_not_overlap():
    figure = figure_with([0.5, 1.0, 0.501, 0.502, 0.0])
    [axes] = figure.axes
    assert names_of(axes) == ["curve 1", "curve 3", "curve 2", "curve 0", "curve 4"]
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the curve
    places = sorted(boxes, key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in zip(places, places[1:], strict=False))
    assert places[0].x0 > axes.get_window_extent().x1 and figure.bbox.x1 > places[0].x1


def test_a_curve_without_an_end_is_named_at_its_last_number():
    assert {*names_of(figure_with([1.0, np.nan]).axes[0])} == {"curve 0", "curve 1"}


def test_an_end_outside_of_the_plot_has_no_name():
    figure, [axes] = pictures.panels("t")
    axes.plot([1, 2], [0.0, 1.0], label="inside")
    axes.plot([1, 2], [0.0, 9.0], label="outside")
    axes.set_ylim(0, 2)
    pictures.label_lines([axes])
    assert names_of(axes) == ["inside"]


def test_a_users_own_settings_change_no_picture(tmp_path):
    pictures.save(figure_with([1.0]), tmp_path / "new" / "a.png")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "savefig.dpi": 20}):
        pictures.save(figure_with([1.0]), tmp_path / "new" / "b.png")
    for form in ("png", "svg"):
        first, second = (tmp_path / "new" / f"{name}.{form}" for name in "ab")
        assert first.read_bytes() == second.read_bytes()


def test_an_svg_has_texts_and_follows_a_dark_screen(tmp_path):
    pictures.save(figure_with([1.0]), tmp_path / "a.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg"}
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "model, data, day" in texts and "curve 0" in texts
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert "prefers-color-scheme: dark" in style.text
