"""What a notebook must upgrade, and when it must restart: distributions as pip records them, and fake modules."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from forerun.upgrade import Lookup, RestartRequired, outdated_packages, replaced_imports

FORERUN = ("jax>=0.10.2", "numpy>=2", "pyarrow>=18; extra == 'data'")
JAX = ("jaxlib<=0.12.0,>=0.12.0", 'libtpu==0.0.50.*; extra == "tpu"')
CUDA = 'jax-cuda12-plugin[with-cuda]<=0.12.0,>=0.12.0; extra == "cuda12"'


def distribution(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = (), files: str = ""
) -> Distribution:
    """Return an installed distribution with a list of its files."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = [f"Requires-Dist: {one}" for one in requires]
    (place / "METADATA").write_text("\n".join([f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *lines]))
    (place / "RECORD").write_text("".join(f"{file},,\n" for file in files.split()))
    for file in files.split():  # since Python 3.12, files that do not exist are omitted
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return Distribution.at(place)


def lookup(folder: Path, **versions: str) -> Lookup:
    """Return a function that finds forerun, and packages with these versions."""
    found = {"forerun": distribution(folder, "forerun", "0.1.0", FORERUN)}
    for key, version in versions.items():
        name = key.replace("_", "-")
        found[name] = distribution(folder, name, version, (*JAX, CUDA) if name == "jax" else ())

    def find(name: str) -> Distribution:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    return find


@pytest.mark.parametrize(
    ("versions", "companions", "names"),
    [
        ({"jax": "0.12.0", "numpy": "2.1.3", "libtpu": "0.0.50.1"}, ["libtpu"], []),
        ({"jax": "0.10.2", "numpy": "2"}, [], []),
        ({"jax": "0.7.2", "numpy": "2.1.3", "libtpu": "0.0.50"}, ["libtpu"], ["jax"]),  # Colab: 0.7 is older than 0.10
        ({"jax": "0.12.0", "numpy": "2.1.3", "libtpu": "0.0.17"}, ["libtpu"], ["libtpu"]),  # Kaggle
        ({"jax": "0.12.0", "numpy": "2.1.3", "libtpu": "0.0.5"}, ["libtpu"], ["libtpu"]),  # 0.0.5 is not 0.0.50
        ({"jax": "0.12.0", "numpy": "2.1.3"}, ["libtpu"], ["libtpu"]),
        (
            {"jax": "0.12.0", "numpy": "2.1.3", "jax_cuda12_plugin": "0.7.2"},
            ["jax-cuda12-plugin"],
            ["jax-cuda12-plugin"],
        ),
        ({"jax": "0.12.0", "numpy": "2.1.3", "jax_cuda12_plugin": "0.12.0"}, ["jax-cuda12-plugin"], []),
        ({"jax": "0.12.0.1", "numpy": "1.26.4"}, [], ["numpy"]),
        ({"numpy": "2.1.3"}, [], ["jax"]),
    ],
)
def test_outdated(tmp_path: Path, versions: dict[str, str], companions: list[str], names: list[str]) -> None:
    problems = outdated_packages(companions, find=lookup(tmp_path, **versions))
    assert [problem.split(" ")[0] for problem in problems] == names


def test_this_installation_is_not_outdated() -> None:
    assert outdated_packages() == []


def module(version: str | None = None) -> ModuleType:
    made = ModuleType("made")
    if version:
        made.__version__ = version  # type: ignore[attr-defined]
    return made


def test_nothing_is_imported_so_no_restart(tmp_path: Path) -> None:
    """A fresh runtime: jax is upgraded before anything has imported it."""
    jax = distribution(tmp_path, "jax", "0.12.0", files="jax/__init__.py jax/numpy/__init__.py")
    assert replaced_imports({"jax": "0.7.2"}, [jax], {}) == []


def test_an_imported_package_was_replaced(tmp_path: Path) -> None:
    jax = distribution(tmp_path, "jax", "0.12.0", files="jax/__init__.py")
    rich = distribution(tmp_path, "rich", "15.0", files="rich/__init__.py rich/console.py")
    same = distribution(tmp_path, "numpy", "2.1.3", files="numpy/__init__.py")
    modules = {"jax": module("0.7.2"), "rich.console": module(), "numpy": module("2.1.3")}
    before = {"jax": "0.7.2", "Rich": "13.9", "numpy": "2.1.3"}
    replaced = replaced_imports(before, [jax, rich, same], modules)
    assert [text.split(" ")[:2] for text in replaced] == [["jax", "0.7.2"], ["rich", "13.9"]]


def test_the_cell_was_run_again_without_a_restart(tmp_path: Path) -> None:
    """The second time, nothing is installed; the old module is still in the process."""
    jax = distribution(tmp_path, "jax", "0.12.0", files="jax/__init__.py")
    assert len(replaced_imports({"jax": "0.12.0"}, [jax], {"jax": module("0.7.2")})) == 1


def test_imported_after_the_upgrade(tmp_path: Path) -> None:
    jax = distribution(tmp_path, "jax", "0.12.0", files="jax/__init__.py")
    assert replaced_imports({"jax": "0.7.2"}, [jax], {"jax": module("0.12.0")}) == []


def test_a_namespace_is_no_import_of_its_packages(tmp_path: Path) -> None:
    """Colab has imported google.colab, which says nothing about google.protobuf."""
    protobuf = distribution(
        tmp_path, "protobuf", "6.0", files="google/protobuf/__init__.py google/_upb/_message.abi3.so"
    )
    assert replaced_imports({"protobuf": "5.0"}, [protobuf], {"google": module()}) == []
    assert (
        len(replaced_imports({"protobuf": "5.0"}, [protobuf], {"google": module(), "google._upb._message": module()}))
        == 1
    )


def test_a_new_package_needs_no_restart(tmp_path: Path) -> None:
    added = distribution(tmp_path, "xxhash", "3.5", files="xxhash/__init__.py")
    assert replaced_imports({}, [added], {"xxhash": module()}) == []


def test_the_import_of_this_module_loads_nothing_else() -> None:
    """The first cell imports it before it is known whether jax must be replaced."""
    program = "import sys; import forerun.upgrade; print('jax' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_this_process_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    from forerun.upgrade import require_current_imports

    before = {found.name: found.version for found in importlib.metadata.distributions()}
    require_current_imports(before)
    monkeypatch.setattr(numpy, "__version__", "1.0")
    with pytest.raises(RestartRequired, match="numpy"):
        require_current_imports(before)


def test_a_notebook_shows_only_the_message() -> None:
    assert RestartRequired("restart")._render_traceback_() == ["restart"]
