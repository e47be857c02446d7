"""The check of the built site finds each kind of fault, and nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import forerun
from forerun.error_catalog import codes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "site"


@pytest.fixture(scope="module")
def site_check() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("site_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("site_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["site_check"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages with a picture and a search index, without faults."""
    (tmp_path / "how-to").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">A</h1><a href="how-to/b.html#end">B</a><img src="a.png">')
    (tmp_path / "how-to" / "b.html").write_text('<p id="end"></p><a href="../index.html">A</a><a href="#end"></a>')
    (tmp_path / "a.png").touch()
    items = [{"location": "index.html"}, {"location": "how-to/b.html#end"}]
    (tmp_path / "search.json").write_text(json.dumps({"items": items}))
    return tmp_path


def test_a_site_without_faults_has_no_problems(site: Path, site_check: ModuleType) -> None:
    pages = site_check.read_pages(site)
    assert len(pages) == 2
    assert site_check.reference_problems(site, pages) == []
    assert site_check.search_problems(site, pages) == []


@pytest.mark.parametrize(
    "fault",
    [
        '<a href="c.html">',
        '<a href="b.html#start">',
        '<a href="#start">',
        '<img src="../b.png">',
        '<a href="../../README.md">',
        '<a href="/how-to/b.html">',
        '<script src="https://example.com/a.js">',
        '<link href="//example.com/a.css">',
    ],
)
def test_a_broken_reference_is_found(site: Path, site_check: ModuleType, fault: str) -> None:
    page = site / "how-to" / "b.html"
    page.write_text(page.read_text() + fault)
    problems = site_check.reference_problems(site, site_check.read_pages(site))
    assert len(problems) == 1
    assert problems[0].startswith("how-to/b.html: ")


def test_links_to_other_hosts_are_not_followed(site: Path, site_check: ModuleType) -> None:
    page = site / "index.html"
    page.write_text(
        page.read_text() + '<a href="https://example.com/page#part"></a><a href="mailto:a@example.com"></a>'
    )
    assert site_check.reference_problems(site, site_check.read_pages(site)) == []


def test_a_page_that_the_search_misses_is_found(site: Path, site_check: ModuleType) -> None:
    (site / "c.html").write_text("<p>")
    assert site_check.search_problems(site, site_check.read_pages(site)) == ["c.html: not in the search index"]


def test_the_navigation_lists_every_page_once(tmp_path: Path, site_check: ModuleType) -> None:
    for name in ("index.md", "a.md", "b.md"):
        (tmp_path / name).touch()
    complete = [{"Home": "index.md"}, {"Part": ["a.md", {"B": "b.md"}]}]
    assert site_check.navigation_problems(tmp_path, complete) == []
    wrong = [{"Home": "index.md"}, {"Part": ["a.md", {"A": "a.md"}, "c.md"]}]
    names = [problem.split()[0].rstrip(":") for problem in site_check.navigation_problems(tmp_path, wrong)]
    assert names == ["b.md", "mkdocs.yml", "mkdocs.yml"]


def test_the_page_of_error_codes_has_every_code_and_note(site_check: ModuleType) -> None:
    page = site_check.error_page("# Head\n\n## E-JOB-018\n\nA note\nof two lines.\n")
    assert re.findall(r"^## (.+)$", page, re.M) == codes()
    assert page.startswith("# Head\n\n## E-")
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    for code, note in (("E-JOB-010", ""), ("E-JOB-018", "\nA note\nof two lines.\n")):
        assert sections[code].rstrip("\n") == f"\n```text\n{forerun.explain(code).texts}\n```\n{note}".rstrip("\n")
