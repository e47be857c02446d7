from __future__ import annotations

from pathlib import Path

import pytest

from forerun.data import text
from forerun.errors import UserError


def test_a_folder_gives_its_text_files_sorted_by_relative_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/LICENSE", "B.TXT", "a.txt", "skip.py", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in text.documents(str(tmp_path))]
    assert found == ["B.TXT", "a.txt", "a/LICENSE", "a/z.md", "b.txt"]


def test_a_single_file_may_have_any_suffix(tmp_path: Path) -> None:
    file = tmp_path / "notes.log"
    file.write_text("x")
    assert text.documents(str(file)) == [file]


def test_text_is_read_as_it_stands_without_the_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfa\r\n\xc3\xa9\n")
    assert text.read(file) == "a\r\né\n"


def test_bytes_that_are_not_utf8_are_named_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc\xff")
    with pytest.raises(UserError) as error:
        text.read(file)
    assert str(file) in error.value.what
    assert "byte 3 is 0xff" in error.value.why


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(UserError, match="no text in"):
        text.documents(str(tmp_path))


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(UserError) as error:
        text.documents(str(tmp_path / "shakespear.txt"))
    assert "shakespeare.txt" in error.value.fix


@pytest.mark.parametrize(("place", "command"), [("gs://bucket/text", "gcloud storage cp"), ("https://a.b/c", "curl")])
def test_an_address_is_not_supported_yet(place: str, command: str) -> None:
    with pytest.raises(UserError, match="not supported yet") as error:
        text.documents(place)
    assert command in error.value.fix
