"""Pages and charts: text of users stays text, templates are complete, and jinja2 is imported late."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from xml.etree import ElementTree

import jinja2
import pytest

from forerun.pages.render import render
from forerun.pages.svg import Element, Plot, Scale, Segment, stacked_bar
from forerun.weights_io.card import curve

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"\"'>{SCRIPT}\x1b[2J\u202e"


class Tags(HTMLParser):
    """Collects the names of all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)


@pytest.fixture
def hostile_chart() -> Plot:
    plot = Plot((360, 200), Scale(0, 1), Scale(0, 1), HOSTILE)
    plot.x_axis({0: HOSTILE}, HOSTILE)
    plot.y_axis({0: HOSTILE}, HOSTILE)
    plot.bar(0, 1, 1, HOSTILE, HOSTILE)
    plot.point(0.5, 0.5, HOSTILE, HOSTILE)
    plot.marker(0.5, HOSTILE)
    plot.names([(HOSTILE, 0.1, 0.5)], above=0)
    return plot


def test_hostile_text_in_a_chart_stays_text(hostile_chart: Plot) -> None:
    for chart in (hostile_chart, stacked_bar([Segment(1.0, "c0", HOSTILE)], 1.0, HOSTILE)):
        markup = chart.__html__()
        assert SCRIPT not in markup
        assert set(Tags(markup).names) <= {"svg", "rect", "line", "text", "title", "circle"}


def test_hostile_text_in_every_value_of_a_page_stays_text(hostile_chart: Plot) -> None:
    text = render(
        "plan.html.jinja",
        **dict.fromkeys(("page_title", "name", "title", "today", "answer", "job", "versions"), HOSTILE),
        **dict.fromkeys(("places", "gpu_memory", "ranges"), HOSTILE),
        **{key: [{HOSTILE: HOSTILE}] for key in ("slices", "spot", "assumptions", "prices", "chips", "gpus")},
        **{key: {"legend": [(HOSTILE,) * 3], "bars": [(HOSTILE,) * 3]} for key in ("memory", "time")},
        notes=[HOSTILE],
        fits=True,
        money={HOSTILE: hostile_chart},
        money_legend=[(HOSTILE,) * 3],
    )
    assert "alert(1)" in text
    assert SCRIPT not in text
    assert not set(Tags(text).names) & {"script", "img", "iframe", "link"}
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("base.html.jinja")


def test_curve_is_an_svg_file_that_is_complete() -> None:
    root = ElementTree.fromstring(curve([(step, 5.0 - step / 100) for step in range(200)], f"nats {SCRIPT}"))
    space = "{http://www.w3.org/2000/svg}"
    line = root.find(f"{space}polyline")
    assert line is not None
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert len(places) == 200
    assert places == sorted(places)  # to the right and, because the loss falls, down
    assert root.find(f"{space}script") is None
    assert ".front" in (root.findtext(f"{space}style") or "")


def test_an_element_writes_numbers_and_names_of_attributes() -> None:
    made = ElementTree.fromstring(Element("line", css="grid", x1=1.25, y1=3, text_anchor="end").__html__())
    assert made.attrib == {"class": "grid", "x1": "1.2", "y1": "3", "text-anchor": "end"}


def test_templates_and_stylesheet_are_in_the_package() -> None:
    folder = resources.files("forerun.pages")
    assert folder.joinpath("style.css").is_file()
    names = {file.name for file in folder.joinpath("templates").iterdir()}
    pages = ("base", "data", "job", "job_values", "parts", "plan", "plan_compact", "run", "sweep", "sweep_frame")
    pages += ("charts", "charts_base", "report_frame", "run_comparison", "run_report")
    assert names == {f"{page}.html.jinja" for page in pages}


def test_jinja2_is_imported_only_for_a_page() -> None:
    program = (
        "import sys, forerun.pages.render, forerun.pages.svg, forerun.weights_io.card\n"
        "assert 'jinja2' not in sys.modules and 'markupsafe' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
