"""Atomic writes and bounded reads, with real file systems, pipes and devices."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forerun.errors import UserError
from forerun.files import atomic_write, atomic_writer, read_regular, require_writable_folder, write_output


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let every write beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_replaces_the_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    atomic_write(file, "old")
    atomic_write(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_keeps_the_old_content_and_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    atomic_write(file, "old")
    with largest_file(1000), pytest.raises(OSError) as failed:  # noqa: PT011 - the errno is asserted below
        atomic_write(file, b"x" * 100_000)
    assert failed.value.errno == errno.EFBIG
    assert failed.value.filename == str(file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_inside_the_block_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with atomic_writer(tmp_path / "file") as out:
            out.write(b"half")
            raise KeyError("x")

    with pytest.raises(KeyError):
        write_half()
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        atomic_write(tmp_path / "missing" / "file", "x")
    assert failed.value.filename == str(tmp_path / "missing" / "file")


def test_a_read_within_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_regular(file, 5) == b"12345"
    with pytest.raises(UserError):
        read_regular(file, 4)


def test_a_pipe_and_a_device_are_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError):
            read_regular(path, 100)


def test_an_output_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_output(tmp_path / "link", "é", fix="")
    assert (tmp_path / "file").read_bytes() == "é".encode()
    assert (tmp_path / "link").is_symlink()


def test_an_output_device_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:  # noqa: PT011 - the errno is asserted below
        write_output(tmp_path / "full", "text", fix="")
    assert failed.value.errno == errno.ENOSPC
    assert failed.value.filename == str(tmp_path / "full")
    assert Path("/dev/full").is_char_device()


def test_an_output_file_in_a_missing_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_output(tmp_path / "missing" / "file", "text", fix="")


@pytest.mark.parametrize("name", ["file", "file/inner", "dangling", "dangling/inner", "loop/inner", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_a_folder_is_rejected_with_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        require_writable_folder(tmp_path / name, "runs")
    assert "runs" in caught.value.what
    assert "runs=" in caught.value.fix
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_system_without_new_folders_is_rejected() -> None:
    with pytest.raises(UserError, match="runs"):
        require_writable_folder(Path("/proc/none/run"), "runs")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, UserError), (errno.EPERM, UserError), (errno.EROFS, OSError), (errno.ENOSPC, OSError)],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    """A disk that fails may recover, so a supervisor waits for it. A missing permission is a mistake."""

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(kind) as caught:
        require_writable_folder(tmp_path / "runs", "runs")
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(tmp_path / "runs")


def test_a_usable_folder_is_left_as_it_is(tmp_path: Path) -> None:
    require_writable_folder(tmp_path / "a" / "b", "runs")
    (tmp_path / "link").symlink_to(tmp_path)
    require_writable_folder(tmp_path / "link" / "b", "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
