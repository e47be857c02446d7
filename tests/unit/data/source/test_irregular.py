"""Data is read from regular files only: pipes, sockets and devices are named and never opened to wait."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forerun.config.schema import Part
from forerun.data.source.sources import open_source
from forerun.errors import UserError


def read_all(path: Path | str) -> None:
    source = open_source(Part(path=str(path)))
    source.identities()
    for piece in source.pieces(1 << 20):
        list(source.rows(piece))


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.csv", "p.jsonl.gz", "p.parquet", "p.arrow"])
@pytest.mark.parametrize("place", ["{folder}/{name}", "{folder}", "{folder}/*"], ids=["file", "folder", "glob"])
def test_a_pipe_is_an_error_that_names_it(tmp_path: Path, name: str, place: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError) as caught:
        read_all(place.format(folder=tmp_path, name=name))
    assert caught.value.what.startswith(str(tmp_path / name))


def test_a_pipe_among_good_files_is_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello there " * 100)
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(UserError) as caught:
        read_all(tmp_path)
    assert caught.value.what.startswith(str(tmp_path / "b.txt"))


def test_a_socket_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("s.txt")
        with pytest.raises(UserError) as caught:
            read_all("s.txt")
    assert caught.value.what.startswith("s.txt")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_an_error_that_names_it(device: str) -> None:
    with pytest.raises(UserError) as caught:
        read_all(device)
    assert caught.value.what.startswith(device)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("hello there " * 100)
    (tmp_path / "a.txt").symlink_to(tmp_path / "target")
    read_all(tmp_path / "a.txt")
