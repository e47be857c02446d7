"""Every error that a user can correct has a code, and `explain` finds what, why and fix of every code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import forerun
from forerun import exit_codes
from forerun.cli.main import main
from forerun.config.load import load
from forerun.error_catalog import CODE, NOTES, PAGE, PLACEHOLDER, SourceModule, code_of, codes, entry_of
from forerun.errors import UserError
from forerun.supervise.leader.verdicts import difference
from forerun.verbs.machine import hardware_table

PACKAGE = Path(forerun.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
NOTES_PAGE = ROOT / PAGE
MOST_LINES_OF_NOTES = 1500
# Errors that were created elsewhere keep their code: `error.code`, `self.code`, `event.content["code"]`.
CODE_OF_ANOTHER_ERROR = re.compile(r"^(str\()?[\w.]+(\.code|\[['\"]code['\"]\])\)?$")


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def error_classes() -> set[str]:
    """Names of UserError, JobValueError and all classes that inherit from them."""
    names: set[str] = {"UserError", "JobValueError"}
    number = 0
    classes = [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while len(names) > number:
        number = len(names)
        names |= {node.name for node in classes if {ast.unparse(base) for base in node.bases} & names}
    return names


def used() -> list[str]:
    return [
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    ]


def test_every_error_has_a_code() -> None:
    classes, without = error_classes(), []
    assert {"UserError", "StorageError", "SaveFailed"} <= classes
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


def test_a_code_belongs_to_one_error() -> None:
    """A code at two places would describe two errors."""
    assert [code for code, number in Counter(used()).items() if number > 1] == []
    assert sorted(used()) == codes()


def test_every_code_has_what_why_and_fix() -> None:
    """`why` may be only a placeholder, such as the message of the operating system."""
    incomplete = []
    for code in codes():
        entry = entry_of(code)
        assert entry.code == code
        texts = (*entry.what, *entry.fix)
        says_nothing = any(PLACEHOLDER.fullmatch(text) for text in texts) or "<...>" in str(entry)
        if not (entry.what and entry.why and entry.fix) or says_nothing or not all(map(str.strip, entry.why)):
            incomplete.append(str(entry))
    assert incomplete == []


def has_form(text: str, forms: tuple[str, ...]) -> bool:
    """Return whether a text of a raised error has one of the forms of the catalog."""
    patterns = (".+".join(re.escape(piece) for piece in PLACEHOLDER.split(form)) for form in forms)
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in patterns)


def load_text(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(text)
    load(folder / "job.yaml")


JOB = "model: qwen3-0.6b\ndata: texts\n"


@pytest.mark.parametrize(
    ("code", "fail"),
    [
        pytest.param("E-JOB-009", lambda folder: load_text(folder, ""), id="constant of a module"),
        pytest.param("E-JOB-010", lambda folder: load_text(folder, "- 1\n"), id="f-string"),
        pytest.param("E-JOB-012", lambda folder: load(folder / "absent.yaml"), id="helpers"),
        pytest.param("E-JOB-018", lambda folder: load_text(folder, JOB + "btach: 1\n"), id="near key"),
        pytest.param("E-JOB-018", lambda folder: load_text(folder, JOB + "qqqqqq: 1\n"), id="no near key"),
        pytest.param("E-JOB-019", lambda folder: load_text(folder, "model: qwen3-0.6b\n"), id="missing key"),
        pytest.param("E-JOB-020", lambda folder: load_text(folder, JOB + "batch: many\n"), id="wrong type"),
        pytest.param("E-JOB-041", lambda folder: load_text(folder, JOB + "steps: 1\nepochs: 1\n"), id="validator"),
        pytest.param(
            "E-JOB-049", lambda folder: load_text(folder, "model: qwen3-0.6b\ndata: ftp://a/b\n"), id="reason"
        ),
        pytest.param("E-JOB-052", lambda folder: load_text(folder, "model: &a b\n"), id="YAML reader"),
        pytest.param("E-COMMAND-013", lambda _: hardware_table("chip"), id="conditional, near"),
        pytest.param("E-COMMAND-013", lambda _: hardware_table("qqqqqq"), id="conditional, not near"),
        pytest.param("E-COMMAND-026", lambda _: forerun.explain("E-NONE-000"), id="number"),
    ],
)
def test_a_raised_error_has_the_forms_of_its_code(code: str, fail: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        fail(tmp_path)
    error, entry = caught.value, forerun.explain(code)
    assert error.code == code
    assert has_form(error.what, entry.what)
    assert has_form(error.why, entry.why)
    assert has_form(error.fix, entry.fix)


@pytest.mark.parametrize("name", ["job", "unroll", "jax"])
def test_a_table_of_fixes_is_listed(name: str) -> None:
    error, entry = difference(name, {0: "a", 1: "b"}), forerun.explain("E-HOSTS-031")
    assert len(entry.fix) == 6
    assert has_form(error.fix, entry.fix)


def test_explain_prints_the_texts_and_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("E-JOB-010", "E-JOB-018", "E-HOSTS-031"):
        assert main(["explain", code]) == 0
        printed, entry = capsys.readouterr().out, forerun.explain(code)
        assert printed.splitlines()[0] == code
        assert [label for label in ("what", "why", "fix", "note") if re.search(rf"^ *{label}: ", printed, re.M)] == [
            "what", "why", "fix", *(["note"] if code in NOTES else [])
        ]  # fmt: skip
        assert all(form in printed for forms in (entry.what, entry.why, entry.fix) for form in forms)
        assert (f"{PAGE}#{code.lower()}\n" in printed) == (code in NOTES)
    assert {"E-JOB-018", "E-HOSTS-031"} <= NOTES
    assert "E-JOB-010" not in NOTES


def test_explain_accepts_a_code_as_people_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert {code_of(text) for text in ("E-JOB-018", "e-job-18", "[E-JOB-018]")} == {"E-JOB-018"}
    assert main(["explain", "E-JBO-018"]) == 2
    printed = capsys.readouterr().err
    assert "[E-COMMAND-026]" in printed
    assert "E-JOB-018" in printed


def test_explain_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == codes()
    assert all(len(line.split()) > 2 for line in lines)


def test_the_code_is_at_the_end_of_the_first_line() -> None:
    error = UserError("E-JOB-018", "first\nsecond", why="w", fix="f")
    assert str(error).splitlines() == ["error: first  [E-JOB-018]", "       second", "  why: w", "  fix: f"]
    assert UserError(**error.parts()).parts() == error.parts()


def test_every_note_belongs_to_a_code() -> None:
    page = NOTES_PAGE.read_text(encoding="utf-8")
    noted = re.findall(r"^## (.+)$", page, re.M)
    assert noted == sorted(NOTES)
    assert set(noted) <= set(codes())
    assert len(page.splitlines()) <= MOST_LINES_OF_NOTES
    assert {code.split("-")[1] for code in codes()} == set(re.findall(r"^\| ([A-Z]+) \|", page, re.M))


def test_the_documentation_has_every_exit_code() -> None:
    page = NOTES_PAGE.read_text(encoding="utf-8")
    values = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.M)} == values | {0}


def test_exit_codes_are_defined_in_one_place() -> None:
    """No other module gives a constant named like an exit code or ends the process with a number."""
    elsewhere = []
    for path, tree in trees():
        # __main__ handles Ctrl-C before it imports anything.
        if path.name in ("exit_codes.py", "__main__.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.exit", "os._exit", "SystemExit"}:
                numbers = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                if any(number != 0 and number is not None for number in numbers):
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


HEAD = """
from forerun.errors import StorageError, UserError

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
    entry = SourceModule(path).entry("E-TEST-001")
    return entry.what, entry.why, entry.fix


@pytest.mark.parametrize(
    ("what", "forms"),
    [
        ('"a" "b"', ("ab",)),
        ('f"{path.name!r} is bad"', ("'<path name>' is bad",)),
        ('f"{len(files)} files"', ("<files> files",)),
        ('"a " + str(path)', ("a <path>",)),
        ("f\"{path} is {'old' if old else 'gone'}\"", ("<path> is old", "<path> is gone")),
        ("f\"{n} file{'s' if n > 1 else ''}\"", ("<n> files",)),
        ('", ".join(map(str, names))', ("<names>",)),
        ('"; ".join(f"not {name}" for name in names)', ("not <name>; ...",)),
        ('"\\n".join(["one", path])', ("one\n<path>",)),
        ('f"{HINT}: {unknown()}"', ("set runs: <unknown>",)),
        ("FIXES[path]", ("do a", "do b")),
        ('FIXES.get(path, f"keep {path}")', ("do a", "do b", "keep <path>")),
        ("helper(path)", ("look in <path>", "look elsewhere")),
        ("path or HINT", ("set runs",)),
        ("error.strerror or error", ("<strerror>", "<error>")),
    ],
)
def test_forms_of_expressions(tmp_path: Path, what: str, forms: tuple[str, ...]) -> None:
    body = f'def fail(path, files):\n    raise UserError("E-TEST-001", {what}, why="w", fix="f")\n'
    assert texts(tmp_path, body) == (forms, ("w",), ("f",))


def test_variables_and_parameters(tmp_path: Path) -> None:
    body = """
def fail(name, why):
    what = f"{name} is bad"
    if name:
        fix, meant = f"write {name}", 1
    else:
        fix, meant = "remove it", 2
    fix += "; then retry"
    raise UserError("E-TEST-001", what, why=why, fix=fix)


def caller():
    fail("data", "a reason")
    fail("model", why="another reason")
"""
    assert texts(tmp_path, body) == (
        ("data is bad", "model is bad"),
        ("a reason", "another reason"),
        ("write data; then retry", "write model; then retry", "remove it; then retry"),
    )


def test_variables_and_helpers_that_contain_themselves_end(tmp_path: Path) -> None:
    body = """
def again(n: int) -> str:
    return f"a {again(n - 1)}" if n else "end"


def fail(text):
    text = f"more {text}"
    raise StorageError("E-TEST-001", text, why=again(text), fix=fix_of(text))
"""
    what, why, fix = texts(tmp_path, body)
    assert what == ("more <text>",)
    assert "end" in why
    assert fix == ("<fix of>",)


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
