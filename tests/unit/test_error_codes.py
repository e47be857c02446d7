"""Every error that a user can correct has a code, and every code has an entry."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun
from forerun import exit_codes
from forerun.cli.main import main
from forerun.error_codes import CODE, code_of, entries
from forerun.errors import UserError

PACKAGE = Path(forerun.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
# Errors that were made elsewhere keep their code: `error.code`, `self.code`, `event.content["code"]`.
CODE_OF_ANOTHER_ERROR = re.compile(r"^(str\()?[\w.]+(\.code|\[['\"]code['\"]\])\)?$")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def error_classes() -> set[str]:
    """Names of UserError, JobValueError and all classes that inherit from them."""
    found, before = {"UserError", "JobValueError"}, 0
    classes = [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while len(found) > before:
        before = len(found)
        found |= {node.name for node in classes if {ast.unparse(base) for base in node.bases} & found}
    return found


def used() -> list[str]:
    return [
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    ]


def test_no_error_is_made_without_a_code() -> None:
    classes, without = error_classes(), []
    assert {"UserError", "StorageError", "SaveFailed", "ProtocolError"} <= classes
    for path, tree in trees():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and called(node) in classes):
                continue
            if not node.args and node.keywords[0].arg is None:  # UserError(**parts) of another process
                continue
            first = node.args[0]
            literal = isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value))
            if not literal and not CODE_OF_ANOTHER_ERROR.match(ast.unparse(first)):
                without.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert without == []


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    assert set(used()) == set(entries())


def test_one_code_is_one_error() -> None:
    """A code at two places would describe two errors."""
    assert [code for code, number in Counter(used()).items() if number > 1] == []


def test_an_entry_has_a_meaning_an_example_and_a_fix() -> None:
    for code, entry in entries().items():
        meaning, _, rest = entry.text.partition("```text\n")
        example, _, fix = rest.partition("\n```")
        assert entry.title, code
        assert len(meaning.split()) > 5, code
        assert f"[{code}]" in example, code
        assert "**Fix.** " in fix, code


@pytest.mark.parametrize("code", entries())
def test_explain_prints_the_entry(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{code}: {entries()[code].title}\n")
    assert "**Fix" not in printed
    assert "```" not in printed
    example = entries()[code].text.partition("```text\n")[2].partition("\n```")[0]
    for line in example.splitlines():
        assert f"  {line}\n" in printed or not line


def test_explain_accepts_a_code_as_people_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert {code_of(text) for text in ("E-JOB-018", "e-job-18", "[E-JOB-018]")} == {"E-JOB-018"}
    assert main(["explain", "E-JBO-018"]) == 2
    printed = capsys.readouterr().err
    assert "[E-COMMAND-026]" in printed
    assert "E-JOB-018" in printed


def test_explain_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(entries())


def test_the_code_is_at_the_end_of_the_first_line() -> None:
    error = UserError("E-JOB-018", "first\nsecond", why="w", fix="f")
    assert str(error).splitlines() == ["error: first  [E-JOB-018]", "       second", "  why: w", "  fix: f"]
    assert UserError(**error.parts()).parts() == error.parts()


def test_the_documentation_has_every_area_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "reference" / "error-codes.md").read_text(encoding="utf-8")
    assert set(re.findall(r'--8<-- "src/forerun/error_codes/(\w+\.md)"', page)) == {
        file.name for file in (PACKAGE / "error_codes").glob("*.md")
    }
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.M)} == codes | {0}


def test_exit_codes_are_defined_in_one_place() -> None:
    """No other module gives a constant named like an exit code or ends the process with a number."""
    elsewhere = []
    for path, tree in trees():
        # __main__ handles Ctrl-C before it imports anything.
        if path.name in ("exit_codes.py", "__main__.py"):
            continue
        for node in ast.walk(tree):
            ends = isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.exit", "os._exit", "SystemExit"}
            if ends and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value not in (0, None):
                elsewhere.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, int)
            ):
                names = {ast.unparse(target) for target in node.targets}
                if names & {name for name in vars(exit_codes) if name.isupper()}:
                    elsewhere.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert elsewhere == []
