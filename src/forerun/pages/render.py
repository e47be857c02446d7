"""Rendering of pages from templates.

A page is one file and loads nothing from the network. Only pages with line charts run a script: `charts.js`, whose
digest is in the policy of the page, so that no other script can run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
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


def chart_script() -> str:
    """Return the script of pages with line charts."""
    return resources.files("forerun.pages").joinpath("charts.js").read_text("utf-8")


def script_digest(script: str) -> str:
    """Return the source that allows exactly this script in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


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
    script = chart_script()
    environment.globals.update(
        style=stylesheet(),
        chart_style=resources.files("forerun.pages").joinpath("charts.css").read_text("utf-8"),
        script=script,
        script_digest=script_digest(script),
        live_script="",  # of a page that a server keeps up to date
    )
    return environment
