"""Fill the templates of reports: Jinja files `*.j2` beside the modules that use them.

jinja2 is imported inside the function, so that training does not wait for it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def render(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Fill the template with values, and return the text.

    In a template `*.html.j2`, values are escaped for HTML.

    Args:
        template: The path of the template.
        filters: Maps the names of Jinja filters to functions. The template can also use Jinja's own
            filters and `cells`, which joins the cells of one row of a Markdown table.
        values: The variables of the template.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=template.name.endswith(".html.j2"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"cells": lambda row: f"| {' | '.join(map(str, row))} |", **filters}
    return environment.get_template(template.name).render(values)
