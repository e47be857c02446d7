"""The arguments of a command are those of its function: name, type, default and help exist once."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from error_assertions import assert_error

import forerun
from forerun.cli.arguments import argument_texts, call, make_parser, options_of
from forerun.cli.commands import COMMANDS, parser_of
from forerun.errors import UserError
from forerun.verbs.option_types import Count, JobFile, Override, Providers, Texts, Value

ROOT = Path(__file__).resolve().parents[3]


def load_script(name: str) -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_parameter_is_in_the_help_the_signature_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a parameter to the source of one function, and nothing else."""
    module = sys.modules[forerun.export.__module__]
    source = inspect.getsource(module)
    source = source.replace("    merge: bool = False,\n", "    merge: bool = False,\n    shards: Count = 3,\n", 1)
    source = source.replace("      dense: for", "      shards: files of the weights, with `merge`\n      dense: for", 1)
    source = source.replace("import Folder,", "import Count, Folder,", 1)
    changed = types.ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, changed)
    exec(compile(source, "export.py", "exec"), vars(changed))
    monkeypatch.setattr(forerun, "export", changed.export)

    help_text = " ".join(parser_of("export").format_help().split())
    assert "--shards N files of the weights, with --merge (default: 3)" in help_text
    assert vars(parser_of("export").read(["run", "--shards", "2"]))["shards"] == 2
    assert inspect.signature(forerun.export).parameters["shards"].default == 3
    entry = load_script("api-reference").entry("export")
    assert "    shards: int = 3," in entry
    assert "- `shards`: files of the weights, with `merge`" in entry


def verb(
    source: str,
    *,
    cache: Annotated[bool, Value(option="no-store", help="store nothing")] = True,
    kind: Literal["a", "b"] = "a",
    size: Count | None = None,
    provider: Providers = (),
    stop: Texts = (),
    quantize: Annotated[str, Value("TYPE", without_value="q8_0")] | None = None,
    reporter: object = None,
) -> dict[str, Any]:
    """Do something.

    Args:
      source: where
        it is
      cache: store the result
      kind: the kind, 100 % of it; see `size`
      size: number (default: all)
      provider: names
      stop: a text
      quantize: a type
      reporter: receives messages
    """
    return {}


@options_of(f"{__name__}:verb", omit=("source",))
def command(
    job: JobFile, *overrides: Override, fast: bool = False, kind: Literal["a", "b"] = "b", **options: Any
) -> dict[str, Any]:
    """Do it.

    Args:
      fast: be quick
    """
    return {"job": job, "overrides": list(overrides), "fast": fast, "kind": kind, **options}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or inspect.getmodule(verb))


def run(words: str) -> dict[str, Any]:
    values = vars(make_parser("test", command, "do it", "forerun test").read(words.split()))
    result: dict[str, Any] = call(command, values)
    return result


def test_only_given_options_are_passed() -> None:
    assert run("job.yaml") == {"job": "job.yaml", "overrides": [], "fast": False, "kind": "b"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fast", {"fast": True}),
        ("--no-store", {"cache": False}),
        ("--kind a", {"kind": "a"}),
        ("--size 3", {"size": 3}),
        ("--provider a,b --provider c", {"provider": ["a", "b", "c"]}),
        ("--stop a,b --stop c", {"stop": ["a,b", "c"]}),
        ("--quantize --fast", {"quantize": "q8_0", "fast": True}),
        ("--quantize f16", {"quantize": "f16"}),
        ("x=1 --fast y=2", {"overrides": ["x=1", "y=2"], "fast": True}),
    ],
)
def test_options_have_the_types_of_the_parameters(words: str, expected: dict[str, Any]) -> None:
    result = run(f"job.yaml {words}")
    assert {name: result[name] for name in expected} == expected


@pytest.mark.parametrize("words", ["", "job.yaml --size 0", "job.yaml --kind c", "job.yaml --size"])
def test_a_wrong_value_is_a_mistake_of_the_user(words: str) -> None:
    with pytest.raises(UserError) as raised:
        run(words)
    assert_error(raised.value, "E-COMMAND-023")


def test_help_has_the_texts_and_the_defaults() -> None:
    text = " ".join(make_parser("test", command, "do it", "forerun test").format_help().split())
    assert "--kind {a,b} the kind, 100 % of it; see --size (default: b)" in text
    assert "--size N number (default: all)" in text
    assert "--no-store store nothing" in text
    assert "JOB job file in YAML" in text
    assert "reporter" not in text


def test_texts_of_a_docstring() -> None:
    texts = argument_texts(verb.__doc__ or "")
    assert texts["source"] == "where it is"
    assert texts["reporter"] == "receives messages"
    assert argument_texts("Do something.") == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_default_is_that_of_the_signature(name: str) -> None:
    """No option has a default in the parser: a value that is not given is not passed."""
    parser = parser_of(name)
    with_default = [action.dest for action in parser._actions if action.default not in ("==SUPPRESS==", [], False)]
    assert with_default == []
