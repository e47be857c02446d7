"""The HTML that notebooks show: names in jobs, metrics and messages must not become markup or scripts."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import pytest

import forerun as fr
from forerun.pages.render import render
from forerun.track.display.make_display import NotebookDisplay
from forerun.verbs.table import Table

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'></td></iframe>\x1b[2J\u202e"


class Tags(HTMLParser):
    """Collects the tags and attributes of a fragment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.frames: list[dict[str, str | None]] = []
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "iframe":
            self.frames.append(dict(attrs))

    def require_harmless(self) -> None:
        assert not self.names & {"script", "img", "svg", "object", "embed", "form", "base", "meta", "link"}
        assert not {name for name in self.attributes if name.startswith("on")}


def test_a_table_escapes_columns_and_values() -> None:
    Tags(Table([{HOSTILE: HOSTILE, "loss": 1.0}])._repr_html_()).require_harmless()


def test_a_job_escapes_its_values() -> None:
    job = fr.Job(model="./model", data={"path": f"./{HOSTILE}.txt"})
    html = job._repr_html_()
    Tags(html).require_harmless()
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_messages_of_a_run_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[str] = []
    monkeypatch.setattr(IPython.display, "HTML", shown.append)
    monkeypatch.setattr(IPython.display, "display", lambda *values, **options: None)
    with NotebookDisplay(io.StringIO(), clock=lambda: 0.0).phase(HOSTILE):
        pass
    assert shown
    for fragment in shown:
        Tags(fragment).require_harmless()
        assert "\x1b" not in fragment


@pytest.mark.parametrize("template", ["report_frame.html.jinja", "sweep_frame.html.jinja"])
def test_pages_are_in_frames_that_run_no_script(template: str) -> None:
    tags = Tags(render(template, title=HOSTILE, name=HOSTILE, content=HOSTILE))
    tags.require_harmless()
    (frame,) = tags.frames
    assert frame["sandbox"] is None, "a token such as allow-scripts would allow more"
    assert "onerror" in str(frame["srcdoc"])
