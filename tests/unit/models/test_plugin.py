"""The job's folder is searched while a plug-in is imported, by the importing thread, and at no other time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.models.plugin import import_plugin, plugin_spec, use_job_folder

BACKENDS = ("jax_plugins", "nvidia", "libtpu")  # jax imports them when it opens a backend
PROBE = """\
import importlib.util
import threading

import beside_plugin_probe

found = {}


def look():
    found["thread"] = importlib.util.find_spec("late_plugin_probe")


other = threading.Thread(target=look)
other.start()
other.join()
found["here"] = importlib.util.find_spec("late_plugin_probe")
for name in ("jax_plugins", "nvidia", "libtpu"):
    found[name] = importlib.util.find_spec(name)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "plugin_probe.py").write_text(PROBE)
    for name in ("beside_plugin_probe", "late_plugin_probe", "json"):
        (tmp_path / f"{name}.py").write_text("")
    for name in BACKENDS:
        (tmp_path / name / "evil").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    use_job_folder(tmp_path)
    yield tmp_path
    use_job_folder(None)
    for name in ("plugin_probe", "beside_plugin_probe"):
        sys.modules.pop(name, None)


def test_the_folder_is_searched_by_the_import_only(folder: Path) -> None:
    paths, finders = list(sys.path), list(sys.meta_path)
    found = import_plugin("plugin_probe").found
    assert found["here"].origin == str(folder / "late_plugin_probe.py")
    assert found["thread"] is None
    for name in BACKENDS:
        spec = found[name]  # the package may be installed
        assert spec is None or str(folder / name) not in (spec.submodule_search_locations or ())
    assert (sys.path, sys.meta_path) == (paths, finders)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_plugin_probe")


def test_a_failed_import_leaves_no_finder(folder: Path) -> None:
    (folder / "plugin_probe.py").write_text("raise RuntimeError\n")
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError):
        import_plugin("plugin_probe")
    assert sys.meta_path == finders


def test_installed_modules_come_first(folder: Path) -> None:
    assert import_plugin("json") is sys.modules["json"]
    assert Path(str(import_plugin("json").__file__)).parent.parent != folder
    for name, inside in (("json", False), ("plugin_probe", True), ("jax_plugins", False)):
        spec = plugin_spec(name)
        assert (spec is not None and str(spec.origin).startswith(str(folder))) is inside


def test_without_a_folder_only_installed_modules_are_found(folder: Path) -> None:
    use_job_folder(None)
    with pytest.raises(ModuleNotFoundError):
        import_plugin("plugin_probe")
    assert plugin_spec("plugin_probe") is None
