"""Rendering of pages from templates. A page is one file: it loads nothing from the network and runs no script."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.safe_text import printable

if TYPE_CHECKING:
    import jinja2


class Cell(NamedTuple):
    """A cell of a table: a text with a CSS class, and a small text below it. Cells can also be plain values or None."""

    text: str
    small: str = ""
    css: str | None = None


def stylesheet() -> str:
    """Return the stylesheet that all pages and charts share."""
    return resources.files("forerun.pages").joinpath("style.css").read_text("utf-8")


def render(template: str, **values: Any) -> str:
    """Return the page of `template` with `values`. Markup and control characters in the values are escaped."""
    return printable(_environment().get_template(template).render(values))


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2  # imported late: most commands write no page

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forerun.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = stylesheet()
    return environment
