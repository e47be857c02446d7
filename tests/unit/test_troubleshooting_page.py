"""docs/how-to/troubleshooting.md and docs/reference/glossary.md: codes, keys and anchors exist."""

from __future__ import annotations

import re
from pathlib import Path

from forerun.config import keys
from forerun.error_catalog import CODE, codes

DOCS = Path(__file__).resolve().parents[2] / "docs"
TROUBLESHOOTING = (DOCS / "how-to" / "troubleshooting.md").read_text("utf-8")
GLOSSARY = (DOCS / "reference" / "glossary.md").read_text("utf-8")


def headings(page: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", page, re.MULTILINE)


def test_every_code_exists() -> None:
    named = set(CODE.findall(TROUBLESHOOTING))
    assert len(named) > 50
    assert named - set(codes()) == set()


def test_every_symptom_of_the_list_has_an_entry() -> None:
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in headings(TROUBLESHOOTING, 2)}
    assert set(re.findall(r"\(#([^)]+)\)", TROUBLESHOOTING)) <= anchors
    assert len(anchors) > 10


def test_every_named_key_is_a_key_of_a_job() -> None:
    sections = set(keys.siblings(""))
    for page in (TROUBLESHOOTING, GLOSSARY):
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", page):
            if key.partition(".")[0] in sections:
                assert key in keys.fields(), key


def test_terms_are_sorted_and_short() -> None:
    for part in re.split(r"^## ", GLOSSARY, flags=re.MULTILINE)[1:]:
        terms = headings(part, 3)
        assert terms == sorted(terms, key=str.casefold)
        for text in re.split(r"^### .+$", part, flags=re.MULTILINE)[1:]:
            plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
            assert len(re.findall(r"[.:;](?:\s|$)", plain)) <= 5, text
