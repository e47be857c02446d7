"""Downloads of results: complete, verified, and never outside their folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from error_assertions import assert_error

from forerun.cloud.record.entries import FinishEntry
from forerun.cloud.view import download as module
from forerun.cloud.view.download import download, result_files
from forerun.errors import StorageError, UserError
from forerun.storage.folder import LocalFolder

CONTENT = {
    "export/model.safetensors": bytes(range(256)) * 100,
    "export/sub/config.json": b"{}",
    "cloud/run/metrics.jsonl": b'{"step": 1}\n',
    "cloud/run/empty": b"",
}


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def bucket(tmp_path: Path) -> LocalFolder:
    folder = LocalFolder(tmp_path / "bucket")
    for name, content in CONTENT.items():
        folder.create(name, content)
    return folder


def finished(**changes: tuple[int, str]) -> FinishEntry:
    files = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENT.items()}
    return FinishEntry(0.0, 1, {**files, **changes})


def test_all_files_arrive(bucket: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)  # several rounds of several chunks, and a shorter last one
    folder, told = tmp_path / "runs" / "quick", []
    result = download(bucket, result_files(finished(), folder), folder, lambda file, size: told.append((file, size)))
    assert (folder / "export" / "model.safetensors").read_bytes() == CONTENT["export/model.safetensors"]
    assert (folder / "export" / "sub" / "config.json").read_bytes() == b"{}"
    assert (folder / "metrics.jsonl").read_bytes() == CONTENT["cloud/run/metrics.jsonl"]
    assert (folder / "empty").read_bytes() == b""
    assert (len(result.downloaded), len(result.present)) == (4, 0)
    assert result.size_bytes == sum(len(content) for content in CONTENT.values())
    assert [size for file, size in told if file.name == "export/model.safetensors"] == [8000, 16000, 24000, 25600]
    assert not list(folder.rglob("*.part"))


def test_a_second_download_reads_only_what_is_missing(bucket: LocalFolder, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    files = result_files(finished(), folder)
    download(bucket, files, folder)
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(bucket.path / "export")
    result = download(bucket, files, folder)
    assert ([one.name for one in result.downloaded], len(result.present)) == (["cloud/run/metrics.jsonl"], 3)


@pytest.mark.parametrize("damage", ["other", "shorter", "longer", "missing"])
def test_a_file_that_is_not_the_recorded_one_is_refused(bucket: LocalFolder, tmp_path: Path, damage: str) -> None:
    name, folder = "export/model.safetensors", tmp_path / "runs"
    content = CONTENT[name]
    changed = {"other": content[:-1] + b"!", "shorter": content[:-1], "longer": content + b"!"}
    bucket.remove(name)
    if damage in changed:
        bucket.create(name, changed[damage])
    entry = finished() if damage != "longer" else finished(**{name: (len(content), "0" * 64)})
    with pytest.raises(StorageError) as caught:
        download(bucket, result_files(entry, folder), folder)
    assert_error(caught.value, "E-CLOUD-074", what=name)
    assert not (folder / name).exists()


def test_other_content_on_this_machine_is_kept(bucket: LocalFolder, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError) as caught:
        download(bucket, result_files(finished(), folder), folder)
    assert_error(caught.value, "E-CLOUD-072", what=str(folder / "metrics.jsonl"))
    assert (folder / "metrics.jsonl").read_text() == "mine"
    assert not (folder / "export").exists()


@pytest.mark.parametrize("name", ["../a", "export/../../a", "/etc/a", "cloud/run/../../a", "cloud/run//etc/a", ""])
def test_names_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        result_files(finished(**{name: (1, "0" * 64)}), tmp_path)
    assert_error(caught.value, "E-CLOUD-071", what=repr(name))


def test_a_full_disk_is_found_before_the_download(
    bucket: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    with pytest.raises(UserError) as caught:
        download(bucket, result_files(finished(), tmp_path / "runs"), tmp_path / "runs")
    assert_error(caught.value, "E-CLOUD-073", why="10 B")
    assert not (tmp_path / "runs").exists()
