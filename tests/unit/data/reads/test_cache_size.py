"""The size of the local cache of a job: the default, the limits, and where it is shown."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from recording_reporter import FailingReporter, RecordingReporter
from tiny_job import JOB, TEXT

from forerun.cli.main import main
from forerun.config.schema import Data
from forerun.data.reads import cache_size as module
from forerun.data.reads.block_cache import BlockCache, geometry_within
from forerun.data.reads.cache_size import bucket_cache, cache_size, job_cache
from forerun.data.reads.patient_reads import ReadCounts

FREE_MIB = 640


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cache folder on a disk with 640 MiB of free space."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    about = SimpleNamespace(f_bavail=FREE_MIB, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda _: about)
    return about


def data_with(cache_gib: float | None = None, store: str = "gs://bucket/tokens") -> Data:
    return Data(path="a.txt", cache_gib=cache_gib).model_copy(update={"store": store})


def opened(data: Data, told: list[str] | None = None) -> BlockCache | None:
    return job_cache(data, ReadCounts(), FailingReporter() if told is None else RecordingReporter(told))


def test_the_default_is_a_tenth_of_the_free_disk(disk: SimpleNamespace, tmp_path: Path) -> None:
    cache = opened(data_with())
    assert cache is not None
    assert cache.size_bytes == geometry_within(FREE_MIB * (1 << 20) // 10).size_bytes  # type: ignore[union-attr]
    assert cache.file == tmp_path / "home" / "forerun" / "blocks" / "cache"
    assert cache.file.stat().st_size < 4096  # it grows when blocks are written


def test_the_limit_of_the_job_counts(disk: SimpleNamespace) -> None:
    cache = opened(data_with(1.5))
    assert cache is not None
    assert 1.49 * 2**30 < cache.size_bytes <= 1.5 * 2**30


def test_zero_means_no_cache(disk: SimpleNamespace, tmp_path: Path) -> None:
    assert opened(data_with(0)) is None
    assert not (tmp_path / "home").exists()


def test_a_disk_without_space_or_without_answer_means_no_cache(
    disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.f_bavail = 0
    assert opened(data_with()) is None

    def failing(_: object) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(os, "statvfs", failing)
    assert opened(data_with()) is None


def test_an_existing_cache_keeps_its_size_while_the_free_disk_changes_little(disk: SimpleNamespace) -> None:
    """Otherwise each start would empty the cache. Its own bytes count as free."""
    first = opened(data_with())
    assert first is not None
    size = first.size_bytes
    first.put(bytes(16), 0, bytes(40 << 20))
    disk.f_bavail -= 40
    assert cache_size(data_with()).free_bytes // (1 << 20) in (FREE_MIB, FREE_MIB + 1)  # the entries are a few KiB
    for free in (FREE_MIB - 40, FREE_MIB * 1.2, FREE_MIB * 0.9):
        disk.f_bavail = int(free)
        assert cache_size(data_with()).limit_bytes == size
    disk.f_bavail = FREE_MIB * 4
    assert cache_size(data_with()).limit_bytes > 3 * size
    disk.f_bavail = 100
    assert cache_size(data_with()).limit_bytes < size / 3


def test_more_than_the_free_disk_is_a_warning(disk: SimpleNamespace) -> None:
    assert cache_size(data_with(0.6)).warning is None
    assert "data.cache_gib" in str(cache_size(data_with(0.7)).warning)


def test_a_store_on_this_machine_has_no_cache(disk: SimpleNamespace) -> None:
    assert bucket_cache(data_with(store="/tokens")) is None
    assert bucket_cache(Data(path="a.txt")) is None
    assert bucket_cache(data_with()) == cache_size(data_with())


def test_check_and_data_show_the_size_and_the_folder_for_a_bucket(
    disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are read from a local folder that counts as a bucket here."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tale.txt").write_text(TEXT)
    (tmp_path / "job.yaml").write_text(JOB)
    words = [str(tmp_path / "job.yaml"), f"data.store={tmp_path / 'tokens'}"]
    shown = f"64.0 MiB, a tenth of 640 MiB that are free for {cache_size(data_with()).file}"
    monkeypatch.setattr(module, "Address", SimpleNamespace(of=lambda _: SimpleNamespace(is_bucket=True)))
    assert main(["check", *words]) == 0
    assert " ".join(["local cache", *shown.split()]).replace(",", "") in " ".join(capsys.readouterr().out.split())
    assert main(["data", *words, "data.cache_gib=0.7"]) == 0
    printed = capsys.readouterr()
    assert f"local cache: 717 MiB, of 640 MiB that are free for {cache_size(data_with()).file}" in printed.out
    assert "data.cache_gib is 717" in printed.err
