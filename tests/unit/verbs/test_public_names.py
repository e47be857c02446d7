"""The public API: its names, its types, and what `import forerun` costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import forerun

PUBLIC = [
    "Answer",
    "CloudRow",
    "ConvertedJob",
    "DataReport",
    "Evaluation",
    "Export",
    "Job",
    "JobReport",
    "LanguageModel",
    "Plan",
    "Profile",
    "Run",
    "RunComparison",
    "RunEntry",
    "RunReport",
    "SearchResult",
    "Stages",
    "StagesPlan",
    "Sweep",
    "Table",
    "TeacherCache",
    "TeacherCachePlan",
    "TokenizerReport",
    "TrainedTokenizer",
    "TrainingProgram",
    "UserError",
    "__version__",
    "build",
    "cache_teacher",
    "check",
    "cloud_resources",
    "compare_ledger",
    "compare_runs",
    "convert",
    "create_job",
    "diagnose",
    "explain",
    "export",
    "fetch_run",
    "hardware_table",
    "inspect_data",
    "inspect_tokenizer",
    "job_schema",
    "load_job",
    "load_model",
    "load_stages",
    "open_run",
    "plan",
    "plan_teacher_cache",
    "profile",
    "report_run",
    "runs",
    "search",
    "sweep",
    "tokenize_data",
    "train",
    "train_tokenizer",
    "verify_data",
]
ROOT = Path(__file__).resolve().parents[3]
CPU_SECONDS = 0.2


def test_the_public_names_are_frozen() -> None:
    """CONTRIBUTING.md says how a public name may change."""
    assert sorted(forerun.__all__) == PUBLIC
    assert dir(forerun) == PUBLIC


def test_each_name_can_be_imported_and_has_a_docstring() -> None:
    for name in PUBLIC:
        value = getattr(forerun, name)
        assert name == "__version__" or inspect.getdoc(value), name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "src" / "forerun" / "__init__.py").read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen | {"__version__"}) == PUBLIC


def test_no_public_name_is_a_module() -> None:
    """Importing a submodule replaces the attribute of its package: `forerun.plan` could then be a module."""
    package = ROOT / "src" / "forerun"
    modules = {path.stem for path in package.glob("*.py")} | {path.name for path in package.iterdir() if path.is_dir()}
    assert modules & set(PUBLIC) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(forerun, "plam")


def test_the_import_is_quick_and_loads_no_large_library() -> None:
    program = (
        "import time; begin = time.process_time(); import forerun, sys; seconds = time.process_time() - begin;"
        "print(seconds, *sorted({'jax', 'numpy', 'pydantic', 'rich', 'yaml'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout
    seconds, *loaded = output.split()
    assert loaded == []
    assert float(seconds) < CPU_SECONDS


def test_the_reference_is_that_of_the_docstrings() -> None:
    script = ROOT / "scripts" / "api-reference"
    ran = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
