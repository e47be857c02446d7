"""Tests of the prose: docstrings start with a verb, and odd phrases do not come back.

First words and phrases are only hints, so the limits leave space for false positives. CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "forerun"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

MAX_SHARE_WITHOUT_VERB = 0.05  # of the docstrings of functions
MAX_PHRASES_IN_SOURCE = 40
MAX_PHRASES_IN_PAGES = 0

# A docstring that starts with one of these is a fragment ("Of all devices together") or names only a thing ("The peak
# FLOP/s"). "Return the peak FLOP/s of all devices" says what the function does.
FRAGMENT_STARTS = """
    Of As By From With Without Until Before After To That For In Into Per At On None What Where How Whether Why Which
    Who Whole Once Here There Only Also Over Under Behind Beside Nothing Nobody False True Like If When While Its Every
    Each All One No This These
"""
NOUN_STARTS = "The A An Two Some"
NO_VERBS = frozenset(f"{FRAGMENT_STARTS} {NOUN_STARTS}".split())

# Each pattern with the words to use instead.
PHRASES = {
    r"\bgo(es)? on\b|\bwent on\b": "continue, resume",
    r"\b(is|are|be) told\b|\btold apart\b": "reported, distinguished",
    r"\bpassed over\b": "skipped",
    r"\bleft out\b": "skipped, omitted",
    r"\bmend(s|ed)?\b": "fix",
    r"\bwhoever\b": "name the process or the user",
    r"\bnobody\b|\bno one\b": "name who, or use the passive voice",
    r"\bwithout a word\b": "silently",
    r"\bby itself\b": "automatically; on its own",
    r"\bso many\b|\bso much\b": "N, that many",
    r"\b(is|are) there\b": "exists, is available",
    r"\bstands?\b(?! for\b)": "is, appears",
    r"\bsays so\b": "reports it",
    r"\bwritten down\b": "recorded",
    r"\bspeaks?\b": "prints, logs, uses the protocol",
    r"\b(is|are) silent\b": "print nothing",
    r"\bkept back\b|\bheld back\b": "held out",
    r"\ba look\b|\blooks? at it\b": "a check, an evaluation",
    r"\bat once\b": "immediately, in one step",
    r"\balike\b": "in the same way",
    r"\bof its own\b|\bof one's own\b|\bof your own\b": "its own, custom",
    r"\bstrangers?\b": "unauthenticated peer",
    r"\bknocks?\b|\bknocking\b": "connection attempt",
    r"\beats?\b": "consumes",
    r"\blearned\b(?= tokens?| ones?| is| are|$)": "trained on, with loss",
    r"\bin turns\b": "alternately",
    r"\bthe rest of it\b|\ball of it\b": "name it",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in PHRASES.items()]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each function's docstring, except of properties, which may start with a noun."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
        text = ast.get_docstring(node)
        if text and not decorators & {"property", "cached_property"}:
            yield node.body[0].lineno, text


def starts_without_verb(docstring: str) -> bool:
    return docstring.split()[0].strip("`'\"(),.:") in NO_VERBS


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of fences, with code spans and link targets replaced by "x"."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " x ", line)


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and strings that have more than three words, with code spans replaced by "x"."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))  # the last: Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                if len(line.split()) > 3:
                    yield token.start[0] + offset, re.sub(r"`[^`]*`", " x ", line)


def phrases(path: Path) -> Iterator[str]:
    """Yield a line of text per odd phrase in a module or page: where it is, and what to write instead."""
    read = prose_of_page if path.suffix == ".md" else prose_of_module
    for number, line in read(path.read_text("utf-8")):
        for pattern, instead in PATTERNS:
            if found := pattern.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: '{found[0]}' (instead: {instead}): {line.strip()}"


def listed(offenders: list[str]) -> str:
    return "".join(f"\n  {one}" for one in offenders)


def test_docstrings_of_functions_start_with_a_verb() -> None:
    found = [(path, line, text) for path in MODULES for line, text in docstrings(path.read_text("utf-8"))]
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path, line, text in found
        if starts_without_verb(text)
    ]
    limit = int(MAX_SHARE_WITHOUT_VERB * len(found))
    assert len(offenders) <= limit, f"{len(offenders)} of {len(found)}, at most {limit}:{listed(offenders)}"


def test_source_has_few_odd_phrases() -> None:
    offenders = [one for path in [*MODULES, *sorted(SOURCE.rglob("*.md"))] for one in phrases(path)]
    assert len(offenders) <= MAX_PHRASES_IN_SOURCE, (
        f"{len(offenders)}, at most {MAX_PHRASES_IN_SOURCE}:{listed(offenders)}"
    )


def test_pages_have_no_odd_phrases() -> None:
    offenders = [one for path in PAGES for one in phrases(path)]
    assert len(offenders) <= MAX_PHRASES_IN_PAGES, (
        f"{len(offenders)}, at most {MAX_PHRASES_IN_PAGES}:{listed(offenders)}"
    )


@pytest.mark.parametrize(
    ("docstring", "odd"),
    [
        ("Return the peak FLOP/s.", False),
        ("Of all devices together.", True),
        ("The peak FLOP/s.", True),
        ("`None`: unknown chip.", True),
    ],
)
def test_first_words(docstring: str, odd: bool) -> None:
    assert starts_without_verb(docstring) is odd


def test_code_in_a_page_is_ignored() -> None:
    page = "It `goes on` [here](goes on).\n```\ngoes on\n```\nIt goes on.\n"
    assert [number for number, line in prose_of_page(page) if "goes on" in line] == [5]
