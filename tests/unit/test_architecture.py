"""The layout of the source: layers without cycles, unique names, packages of a readable size."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import forerun

SOURCE = Path(forerun.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MAX_MODULES = 22


def modules() -> dict[str, Path]:
    """All modules by their dotted names."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(("forerun", *path.relative_to(SOURCE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a module imports, also inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(known)) - {name}


def layer_rows() -> list[list[str]]:
    """The packages of each layer of the import contract."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one.get("containers") == ["forerun"])
    return [[name.strip("()") for name in re.split(r"\s*[|:]\s*", row)] for row in contract["layers"]]


def test_there_is_no_import_cycle() -> None:
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from error


def test_no_two_public_classes_of_a_layer_have_one_name() -> None:
    known, twice = modules(), []
    for row in layer_rows():
        where: dict[str, list[str]] = defaultdict(list)
        for name, path in known.items():
            if name.split(".")[1:2] and name.split(".")[1] in row:
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        where[node.name].append(name)
        twice += [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]
    assert twice == []


def test_no_package_has_too_many_modules() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    sizes = {str(folder.relative_to(SOURCE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}


def test_every_package_says_what_it_contains() -> None:
    for path in SOURCE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_the_diagram_is_that_of_the_contract() -> None:
    assert subprocess.run([sys.executable, ROOT / "scripts" / "architecture-diagram", "--check"]).returncode == 0


def test_the_page_names_every_package() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    packages = {name for row in layer_rows() for name in row if (SOURCE / name).is_dir()}
    assert {name for name in packages if f"`{name}`" not in page} == set()
