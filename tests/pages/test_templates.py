"""Templates: rows of Markdown tables, filters, escapes for HTML alone, and missing variables."""

from __future__ import annotations

import jinja2
import pytest

from megatron.templates import render


@pytest.fixture
def fill(tmp_path):
    """Return a function that writes a template and fills it."""

    def fill(name: str, text: str, **values: object) -> str:
        (tmp_path / name).write_text(text)
        return render(tmp_path / name, {"double": lambda x: 2 * x}, **values)

    return fill


def test_a_template_is_filled(fill):
    text = "{% for row in rows %}\n{{ row | cells }}\n{% endfor %}\n{{ 4 | double }}\n"
    assert fill("page.md.j2", text, rows=[("a", 1), ("<b>", None)]) == (
        "| a | 1 |\n| <b> | None |\n8\n"
    )


def test_values_are_escaped_in_html_alone(fill):
    assert fill("page.html.j2", "<p>{{ x }}</p>", x="<b> & c") == "<p>&lt;b&gt; &amp; c</p>"
    assert fill("page.md.j2", "{{ x }}", x="<b> & c") == "<b> & c"


def test_a_missing_value_is_an_error(fill):
    with pytest.raises(jinja2.UndefinedError, match="'y' is undefined"):
        fill("page.md.j2", "{{ y }}", x=1)
