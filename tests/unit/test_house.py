"""The house keeps its own rules: sizes, names, explanations, and no dependency without a record."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "forerun"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 600
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
FORBIDDEN_PACKAGES = {"torch", "tensorflow", "flax"}
TESTS = ROOT / "tests"
# CI runs no test of these files, because the cheapest one takes more than 40 seconds.
EMPTY_IN_CI = {
    "tests/aot/test_sinks_program.py",
    "tests/e2e/test_hugging_face.py",
    "tests/faults/test_guard_faults.py",
    "tests/faults/test_ray.py",
    "tests/faults/test_runs_hosts.py",
    "tests/faults/test_slices.py",
    "tests/unit/run/test_expert_run.py",
}
# Strings of four words or more that tests compare, and patterns for the text of an exception. Better wording breaks
# such tests, so they compare codes and values instead (tests/support/error_assertions.py). These numbers only go down.
MAX_COMPARED_SENTENCES = 320
MAX_MATCHED_TEXTS = 122
LIGHT_ROOMS = ("cli", "config", "hardware", "hub")


def hard_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}


def recorded_dependencies() -> set[str]:
    records = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "adr").glob("*.md")))
    return {canonicalize_name(name) for name in re.findall(r"^[-*\s]*dependency: ([\w-]+)", records, re.MULTILINE)}


def direct_requirements(package: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(package) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def closure(names: set[str]) -> set[str]:
    """Everything that a base install of `names` brings along."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, frozenset[str]()) for name in names]
    while waiting:
        package = waiting.pop()
        if package in seen:
            continue
        seen.add(package)
        for requirement in direct_requirements(*package):
            waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_module_is_a_drawer_for_anything() -> None:
    names = {path.relative_to(SOURCE): {part.removesuffix(".py") for part in path.parts} for path in MODULES}
    assert [str(path) for path, parts in names.items() if parts & FORBIDDEN_NAMES] == []


def test_only_one_module_knows_how_forerun_is_installed() -> None:
    """A fix that names an index fails for a clone and a wheel: `installation.install_command` names the right place."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    texts = {path: path.read_text("utf-8") for path in [*MODULES, *SOURCE.rglob("*.yaml"), *pages]}
    named = [path for path, text in texts.items() if re.search(r"\bforerun\[|pip install [\"']?forerun\b", text)]
    assert [str(path.relative_to(ROOT)) for path in named] == []


def test_every_file_says_what_it_is_for() -> None:
    silent = [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in MODULES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_hard_dependency_has_a_record() -> None:
    assert hard_dependencies() == recorded_dependencies()


def test_base_install_is_free_of_other_frameworks() -> None:
    packages = closure(hard_dependencies())
    assert "jaxlib" in packages, "the walk itself does not work"
    assert packages & FORBIDDEN_PACKAGES == set()


def test_command_line_job_and_tables_import_no_jax() -> None:
    """`forerun --help` and a config error must not wait for jax."""
    modules = sorted(
        ".".join(("forerun", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for room in LIGHT_ROOMS
        for path in (SOURCE / room).rglob("*.py")
    )
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, f'{name} imports jax at import time'\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_lock_files_name_no_host() -> None:
    for lock in sorted((ROOT / "requirements").iterdir()):
        hosts = [line for line in lock.read_text().splitlines() if re.search(r"://|^--|\.(com|org|io)\b", line)]
        assert hosts == [], f"{lock.name}: see docs/adr/0005-lock-files.md"


def test_every_text_file_names_its_encoding() -> None:
    """Without it, the content of a file would depend on the user's locale."""
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in MODULES for node in unspecified_encodings(path)]
    assert found == []


def unspecified_encodings(path: Path) -> Iterator[ast.Call]:
    """Yield calls that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        modes = [text for text in texts if re.fullmatch(r"[rwax]\+?t?", text)]
        text_process = any(word.arg == "text" and ast.unparse(word.value) == "True" for word in node.keywords)
        without = {"read_text": not node.args, "write_text": len(node.args) < 2, "open": modes, "fdopen": modes}
        without["TemporaryFile"] = without["NamedTemporaryFile"] = modes
        if (
            without.get(name)
            or text_process
            or (isinstance(node.func, ast.Name) and name == "open" and len(node.args) == 1)
        ):
            yield node


def test_no_child_process_imports_from_the_working_directory() -> None:
    """`forerun` also sets PYTHONSAFEPATH, which would hide a flag that is missing here."""
    starts = r"sys\.executable,(?! \*WORKER)|^WORKER = \("
    texts = [
        re.sub(r"sys\.executable,\n\s*", "sys.executable, ", file.read_text("utf-8")) for file in SOURCE.rglob("*.py")
    ]
    found = [line.strip() for text in texts for line in text.splitlines() if re.search(starts, line)]
    assert len(found) >= 5
    assert [line for line in found if not re.search(r'"-[PI]",', line)] == []


def test_no_attribute_is_guessed_through_two_objects() -> None:
    """A model declares its capabilities; nested `getattr` calls would read an undeclared interface."""
    found = [path for path in MODULES if re.search(r"getattr\(\s*getattr\(", path.read_text("utf-8"))]
    assert [str(path.relative_to(SOURCE)) for path in found] == []


def test_only_config_and_methods_read_the_method_sections() -> None:
    """Other packages ask `job.method`, so that a new method does not change every place that depends on one."""
    sections = {"lora", "qat", "distil", "preferences"}
    others = [path for path in MODULES if path.relative_to(SOURCE).parts[0] not in ("config", "methods")]
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in sections
    ]
    assert found == []


def test_messages_go_to_a_reporter() -> None:
    """A function that reports something takes a `Reporter` as `reporter`, and no callable for messages."""
    names = {"tell", "say", "warn", "announce", "on_progress"}
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.arg}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.arg)
        and (node.arg in names or (node.annotation and ast.unparse(node.annotation) == "Callable[[str], None]"))
    ]
    assert found == []


def listed_outside_ci() -> list[str]:
    """Return the node ids of the list that `bench/ci_sample.py` writes."""
    lines = (TESTS / "outside_ci.tsv").read_text("utf-8").splitlines()
    return [line.split("\t")[1] for line in lines if not line.startswith("#")]


def is_slow(node: ast.AST) -> bool:
    """Return whether an expression is the marker `slow` or a list with it. Marks of single cases do not count."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(is_slow(element) for element in node.elts)
    return ast.unparse(node) == "pytest.mark.slow"


def functions_in_ci(file: Path) -> set[str]:
    """Return the names of the test functions of a file that do not have the marker `slow` in their source."""
    body = ast.parse(file.read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and is_slow(node.value):
            return set()
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name for node in functions if not any(is_slow(one) for one in node.decorator_list)}


def test_listed_tests_outside_ci_exist() -> None:
    """Remove the lines of renamed tests, or run `bench/ci_sample.py` with new recorded seconds."""
    places = [name.partition("[")[0].partition("::") for name in listed_outside_ci()]
    functions = {file: functions_in_ci(ROOT / file) for file, _, _ in places}
    assert [f"{file}::{name}" for file, _, name in places if name not in functions[file]] == []


def test_ci_runs_a_test_of_each_file() -> None:
    omitted = set(listed_outside_ci())
    names = {str(file.relative_to(ROOT)): functions_in_ci(file) for file in sorted(TESTS.rglob("test_*.py"))}
    empty = [name for name, found in names.items() if found and all(f"{name}::{test}" in omitted for test in found)]
    assert empty == sorted(EMPTY_IN_CI)


def compared_sentences(tree: ast.Module) -> int:
    """Count the strings of four words or more in the conditions of assertions. Their messages do not count."""
    conditions = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    constants = [node for condition in conditions for node in ast.walk(condition) if isinstance(node, ast.Constant)]
    return sum(isinstance(node.value, str) and len(node.value.split()) >= 4 for node in constants)


def matched_texts(tree: ast.Module) -> int:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    raises = [call for call in calls if ast.unparse(call.func) in ("pytest.raises", "pytest.warns")]
    return sum(keyword.arg == "match" for call in raises for keyword in call.keywords)


def test_tests_compare_codes_and_values_instead_of_sentences() -> None:
    trees = [ast.parse(file.read_text("utf-8")) for file in sorted(TESTS.rglob("*.py"))]
    assert sum(map(compared_sentences, trees)) <= MAX_COMPARED_SENTENCES
    assert sum(map(matched_texts, trees)) <= MAX_MATCHED_TEXTS
