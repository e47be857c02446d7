"""The command that adds an extra must work for the way in which forerun was installed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from forerun import installation
from forerun.installation import install_command

METADATA = """\
Metadata-Version: 2.4
Name: forerun
Version: 0.1.0
Requires-Dist: numpy>=2
Requires-Dist: jax[tpu]; extra == 'plan'
Requires-Dist: pyarrow>=18; extra == 'data'
Requires-Dist: zstandard>=0.23; extra == "data"
Provides-Extra: plan
Provides-Extra: data
"""


def distribution(folder: Path, origin: dict[str, object] | None, installer: str = "pip") -> Distribution:
    """Return a distribution as pip or uv record it."""
    folder = folder / "forerun-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA, encoding="utf-8")
    (folder / "INSTALLER").write_text(f"{installer}\n", encoding="utf-8")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    return Distribution.at(folder)


def requirement(command: str) -> list[str]:
    """The words behind `install`, as a shell splits them."""
    words = shlex.split(command)
    return words[words.index("install") + 1 :]


def test_from_an_index(tmp_path: Path) -> None:
    found = distribution(tmp_path, None)
    assert requirement(install_command("plan", found)) == ["forerun[plan]"]
    assert requirement(install_command(None, found)) == ["forerun"]


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_clone(tmp_path: Path, editable: bool) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    found = distribution(tmp_path / "site", {"url": clone.as_uri(), "dir_info": {"editable": editable}})
    assert requirement(install_command("plan", found)) == [*(["-e"] if editable else []), f"{clone}[plan]"]


def test_from_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "forerun-0.1.0-py3-none-any.whl"
    wheel.touch()
    found = distribution(tmp_path / "site", {"url": wheel.as_uri(), "archive_info": {}})
    assert requirement(install_command("data", found)) == [f"forerun[data] @ {wheel.as_uri()}"]


def test_from_an_address(tmp_path: Path) -> None:
    url = "https://files.example/forerun-0.1.0-py3-none-any.whl"
    assert requirement(install_command("data", distribution(tmp_path, {"url": url, "archive_info": {}}))) == [
        f"forerun[data] @ {url}"
    ]


def test_from_a_repository(tmp_path: Path) -> None:
    origin = {
        "url": "https://git.example/forerun",
        "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "0" * 40},
    }
    assert requirement(install_command("data", distribution(tmp_path, origin))) == [
        "forerun[data] @ git+https://git.example/forerun@main"
    ]


@pytest.mark.parametrize("kind", ["dir_info", "archive_info"])
def test_from_a_place_that_is_gone(tmp_path: Path, kind: str) -> None:
    found = distribution(tmp_path / "site", {"url": (tmp_path / "gone").as_uri(), kind: {}})
    assert requirement(install_command("data", found)) == ["pyarrow>=18", "zstandard>=0.23"]
    assert requirement(install_command("plan", found)) == ["jax[tpu]"]
    assert requirement(install_command(None, found)) == ["numpy>=2"]


def test_without_a_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_installed", lambda: None)
    monkeypatch.setattr(installation, "SOURCE", tmp_path)
    assert requirement(install_command("plan")) == ["forerun[plan]"]
    (tmp_path / "pyproject.toml").touch()
    assert requirement(install_command("plan")) == [f"{tmp_path}[plan]"]


@pytest.mark.parametrize("origin", [[], "text", {"url": 3}])
def test_a_damaged_record_counts_as_none(tmp_path: Path, origin: dict[str, object]) -> None:
    assert install_command("plan", distribution(tmp_path, origin))


def test_the_installer_works_on_this_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment of uv has no pip, and the first pip of the path may belong to another one."""
    found = distribution(tmp_path, None, "uv")
    has_pip = True
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: object() if has_pip else None)
    monkeypatch.setattr(installation.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert install_command("plan", found) == "pip install 'forerun[plan]'"
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/other/bin/{name}")
    assert shlex.split(install_command("plan", found)) == [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "forerun[plan]",
    ]
    has_pip = False
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert install_command("plan", found) == "uv pip install 'forerun[plan]'"
    monkeypatch.delenv("VIRTUAL_ENV")
    assert shlex.split(install_command("plan", found)) == [
        *("uv", "pip", "install", "--python", sys.executable),
        "forerun[plan]",
    ]


def test_this_installation() -> None:
    """The tests run in a clone, and the command must name a place that exists."""
    *_, place = shlex.split(install_command("plan"))
    folder = Path(place.removesuffix("[plan]"))
    assert place.endswith("[plan]")
    assert (folder / "pyproject.toml").is_file()
    command = [sys.executable, "-c", "import forerun; print(forerun.__file__)"]
    used = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert Path(used.stdout.strip()).is_relative_to(folder)
