"""`data.separator`: documents of one text file, against what `str.split` makes of the whole text."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from forerun.config.schema import Data, Part
from forerun.data.source import lines, plain
from forerun.data.source.rows import BadRow, FilePiece, SourceRow
from forerun.data.source.sources import Source, open_source
from forerun.errors import UserError

END = "<|endoftext|>"


def split(text: str, separator: str) -> list[tuple[int, str]]:
    """The documents and their numbers, found in the whole text."""
    parts = [(number, part.strip("\r\n")) for number, part in enumerate(text.split(separator), 1)]
    return [(number, part) for number, part in parts if part.strip()]


def read(source: Source, pieces: list[FilePiece]) -> list[tuple[int | None, str | None]]:
    found = [(piece, row) for piece in pieces for row in source.rows(piece)]
    return [
        (source.resolve(piece, row.place).number, row.values["text"] if isinstance(row, SourceRow) else None)
        for piece, row in found
    ]


def stories(count: int, separator: str) -> str:
    draw = random.Random(count)
    pieces = [draw.choice(["", "\n", "é" * draw.randint(1, 40), f"Once {n}.\nTwice.", "<|end", separator[:-1]])
              for n in range(count)]  # fmt: skip
    return f"\n{separator}\n".join([*pieces, "the last one"])


@pytest.mark.parametrize("separator", [END, "\n\n", "---", "ää"])
@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_blocks_and_pieces_of_any_size_give_the_documents_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, block: int
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block)
    text = stories(30, separator)
    file = tmp_path / "stories.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    source = open_source(Part(path=str(file), separator=separator))
    source = Source.from_json(json.dumps(source.to_json()))  # as a worker gets it
    for size in (1, 3, 17, 100, 10_000):
        assert read(source, source.pieces(size)) == split(text, separator)
    packed = tmp_path / "stories.txt.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    source = open_source(Part(path=str(packed), separator=separator))
    assert read(source, source.pieces(10)) == split(text, separator)


def test_a_file_larger_than_a_document_may_be_is_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "MAX_TEXT_BYTES", 100)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    file = tmp_path / "many.txt"
    file.write_text(END.join(["a" * 90, "b" * 101, "c" * 100] * 5))
    source = open_source(Part(path=str(file), separator=END))
    for piece_bytes in (10_000, 200):
        found = read(source, source.pieces(piece_bytes))
        assert found == [
            (n, None if n % 3 == 2 else "ac"[n % 3 == 0] * (100 if n % 3 == 0 else 90)) for n in range(1, 16)
        ]
    (whole,) = open_source(Part(path=str(file))).rows(FilePiece(0, 0, -1))
    assert isinstance(whole, BadRow)
    assert "data.separator" in whole.fix


def test_a_document_that_is_not_utf8_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one<s>t\xffo<s>three")
    source = open_source(Part(path=str(file), separator="<s>"))
    for size in (4, 100):
        assert read(source, source.pieces(size)) == [(1, "one"), (2, None), (3, "three")]
    (bad,) = [row for row in source.rows(FilePiece(0, 0, -1)) if isinstance(row, BadRow)]
    assert str(bad.place) == f"{file}, document 2"


def test_nothing_but_separators_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{END}\n{END}")
    source = open_source(Part(path=str(tmp_path / "a.txt"), separator=END))
    (bad,) = source.rows(source.pieces(100)[0])
    assert isinstance(bad, BadRow)


def test_rows_of_text_are_divided_too_and_other_forms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"one{END}\ntwo{END}"}) + "\n" + json.dumps({"text": END}))
    source = open_source(Data(path=str(tmp_path / "a.jsonl"), separator=END))
    assert read(source, source.pieces(100)) == [(1, "one"), (1, "two"), (2, None)]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(UserError, match="E-DATA-054"):
        open_source(Data(path=str(tmp_path / "a.jsonl"), separator=END))
