"""The forms of an error's texts are read from source code of any shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.error_catalog import raise_sites

HEAD = """
from forerun.errors import StorageError, UserError

LIMIT = 1000
HINT = "set runs"
FIXES = {"a": "do a", "b": "do b"}


def helper(path: str) -> str:
    if path:
        return f"look in {path}"
    return "look elsewhere"

"""


def texts(folder: Path, body: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return what, why and fix of the error E-TEST-001 that `body` raises."""
    path = folder / "source.py"
    path.write_text(HEAD + body)
    entry = raise_sites(path)["E-TEST-001"].entry()
    return entry.what, entry.why, entry.fix


@pytest.mark.parametrize(
    ("what", "forms"),
    [
        ('"a" "b"', ("ab",)),
        ('f"{path} is bad"', ("<path> is bad",)),
        ('f"{path.name!r} is bad"', ("'<path name>' is bad",)),
        ('f"{len(files)} files"', ("<number of files> files",)),
        ('f"at most {LIMIT:,}"', ("at most 1,000",)),
        ('"a " + str(path)', ("a <path>",)),
        ('f"file {count + 1}"', ("file <count>",)),
        ('"a" if path else "b"', ("a", "b")),
        ("f\"{path} is {'old' if old else 'gone'}\"", ("<path> is old", "<path> is gone")),
        ("f\"{n} file{'s' if n > 1 else ''}\"", ("<n> files",)),
        ('", ".join(names)', ("<names>",)),
        ('"; ".join(f"not {name}" for name in names)', ("not <name>; ...",)),
        ('"\\n".join(["one", path])', ("one\n<path>",)),
        ("HINT", ("set runs",)),
        ('f"{HINT}: {unknown()}"', ("set runs: <unknown>",)),
        ("FIXES[path]", ("do a", "do b")),
        ('FIXES.get(path, f"keep {path}")', ("do a", "do b", "keep <path>")),
        ("helper(path)", ("look in <path>", "look elsewhere")),
        ("path or HINT", ("set runs",)),
        ("str(path)", ("<path>",)),
    ],
)
def test_expressions(tmp_path: Path, what: str, forms: tuple[str, ...]) -> None:
    body = f'def fail(path, files):\n    raise UserError("E-TEST-001", {what}, why="w", fix="f")\n'
    assert texts(tmp_path, body) == (forms, ("w",), ("f",))


def test_variables_and_parameters(tmp_path: Path) -> None:
    body = """
def fail(name, why="a default"):
    what = f"{name} is bad"
    if name:
        fix, meant = f"write {name}", 1
    else:
        fix, meant = "remove it", 2
    fix += "; then retry"
    raise UserError("E-TEST-001", what, why=why, fix=fix)


def caller():
    fail("data")
    fail("model", why="a reason")
"""
    what, why, fix = texts(tmp_path, body)
    assert what == ("data is bad", "model is bad")
    assert why == ("a default", "a reason")
    assert fix == ("write data; then retry", "write model; then retry", "remove it; then retry")


def test_a_variable_that_contains_itself_ends(tmp_path: Path) -> None:
    body = """
def fail(text):
    text = f"more {text}"
    raise StorageError("E-TEST-001", text, why="w", fix=fix_of(text))
"""
    assert texts(tmp_path, body) == (("more <text>",), ("w",), ("<fix of>",))


def test_a_recursive_helper_ends(tmp_path: Path) -> None:
    body = """
def again(n: int) -> str:
    return f"a {again(n - 1)}" if n else "end"


def fail(n):
    raise UserError("E-TEST-001", "what", why=again(n), fix="f")
"""
    _, why, _ = texts(tmp_path, body)
    assert "end" in why


@pytest.mark.parametrize(
    ("name", "why", "forms"),
    [
        ("JobValueError", "", ("<place> sets <key>",)),
        ("JobValueError", ', why="it is old"', ("<place> sets <key>: it is old",)),
        ("Mistake", ', why="has it"', ("<place> has it",)),
        ("UserError", "", ()),
    ],
)
def test_the_place_that_a_caller_adds(tmp_path: Path, name: str, why: str, forms: tuple[str, ...]) -> None:
    assert texts(tmp_path, f'def fail():\n    raise {name}("E-TEST-001", "a"{why}, fix="f")\n')[1] == forms


def test_a_code_in_a_constant(tmp_path: Path) -> None:
    body = 'MISSING = "E-TEST-001"\n\n\ndef fail():\n    raise UserError(MISSING, "a", why="w", fix="f")\n'
    assert texts(tmp_path, body) == (("a",), ("w",), ("f",))
