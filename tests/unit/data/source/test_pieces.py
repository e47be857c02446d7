from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.config import addresses
from forerun.config.schema import Data, Part
from forerun.data.source import lines, plain
from forerun.data.source.rows import BadRow, FilePiece, SourceRow
from forerun.data.source.sources import Source, open_source

PYARROW = "pyarrow is not installed (the data extra)"


def in_pieces(source: Source, pieces: list[FilePiece]) -> tuple[list[Any], list[int | None]]:
    """Values, None for a bad row; and the absolute numbers."""
    values, numbers = [], []
    for piece in pieces:
        for row in source.rows(piece):
            values.append(row.values if isinstance(row, SourceRow) else None)
            numbers.append(source.resolve(piece, row.place).number)
    return values, numbers


def lines_of(raw: bytes) -> tuple[list[Any], list[int]]:
    """What a JSONL file holds, told without forerun."""
    values: list[Any] = []
    numbers = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            numbers.append(number)
            try:
                values.append({"text": json.loads(line)["text"]})
            except ValueError:
                values.append(None)
    return values, numbers


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_jsonl_cut_at_every_byte_loses_and_doubles_nothing(tmp_path: Path, end: bytes, last: bool, mark: bytes) -> None:
    lines = [b'{"text": "a"}', b"", b'{"text": "\xc3\xa9"}', b"  ", b"not json", b'{"text": "last"}']
    raw = mark + end.join(lines) + (end if last else b"")
    (tmp_path / "a.jsonl").write_bytes(raw)
    source = open_source(Part(path=str(tmp_path)))
    for border in range(1, len(raw)):
        halves = [FilePiece(0, 0, border), FilePiece(0, border, len(raw))]
        assert in_pieces(source, halves) == lines_of(raw), border


def test_jsonl_in_pieces_of_any_size_is_the_whole(tmp_path: Path) -> None:
    rng = random.Random(0)
    for case in range(12):
        end = rng.choice([b"\n", b"\r\n"])
        lines = [
            rng.choice([b"", b" ", b"[1]x", json.dumps({"text": "é" * rng.randint(1, 60)}).encode()])
            for _ in range(rng.randint(1, 60))
        ]
        raw = (
            rng.choice([b"", b"\xef\xbb\xbf"]) + end.join([b'{"text": "x"}', *lines]) + rng.choice([b"", end, end * 3])
        )
        (tmp_path / "a.jsonl").write_bytes(raw)
        source = open_source(Part(path=str(tmp_path)))
        for piece_bytes in (1, 7, 64, rng.randint(1, 500), 1 << 40):
            pieces = source.pieces(piece_bytes)
            assert in_pieces(source, pieces) == lines_of(raw), (case, piece_bytes)
            assert pieces == source.pieces(piece_bytes)


def test_pieces_are_read_independently_and_in_any_order(tmp_path: Path) -> None:
    texts = [f"text {at}" for at in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = open_source(Part(path=str(tmp_path)))
    pieces = source.pieces(1000)
    assert 15 <= len(pieces) <= 25
    parts = {piece: [row.values["text"] for row in source.rows(piece)] for piece in reversed(pieces)}  # type: ignore[union-attr]
    assert [text for piece in pieces for text in parts[piece]] == texts


def test_a_line_longer_than_a_block_and_many_pieces_belongs_to_one(tmp_path: Path) -> None:
    texts = ["a", "b" * 3_000_000, "c"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = open_source(Part(path=str(tmp_path)))
    values, numbers = in_pieces(source, source.pieces(500_000))
    assert [value["text"] for value in values] == texts
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_tables_in_pieces_are_the_whole(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    texts = [f"text {at}" if at % 100 else None for at in range(1, 1201)]
    table = arrow.table({"text": texts})
    if name == "a.parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / name, row_group_size=70)
    else:
        with arrow.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    source = open_source(Part(path=str(tmp_path)))
    wanted = [None if text is None else {"text": text} for text in texts]
    for piece_bytes, most in ((1, 18), (2000, 17), (1 << 40, 1)):
        pieces = source.pieces(piece_bytes)
        assert len(pieces) == 18 if piece_bytes == 1 else len(pieces) <= most
        assert in_pieces(source, pieces) == (wanted, list(range(1, 1201)))


def test_packed_and_separated_files_are_one_piece_each(tmp_path: Path) -> None:
    for at in range(3):
        (tmp_path / f"{at}.csv").write_text("text\n" + f"{at}\n" * 1000)
    source = open_source(Part(path=str(tmp_path)))
    assert source.pieces(10) == [FilePiece(at, 0, 2005) for at in range(3)]
    assert source.size_bytes == 3 * 2005
    assert [value["text"] for value in in_pieces(source, source.pieces(10))[0]] == ["0"] * 1000 + ["1"] * 1000 + [
        "2"
    ] * 1000


def test_pieces_of_a_store_are_read_with_seek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "DATA_PROTOCOLS", (*addresses.DATA_PROTOCOLS, "memory"))
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed (the data extra)")
    store = fsspec.filesystem("memory")
    raw = b"".join(json.dumps({"text": f"text {at}"}).encode() + b"\n" for at in range(500)) + b"bad\n"
    store.pipe({"/pieces/a.jsonl": raw})
    try:
        source = open_source(Part(path="memory://pieces"))
        copy = Source.from_json(source.to_json())
        assert len(copy.pieces(1000)) > 5
        assert in_pieces(copy, copy.pieces(1000)) == lines_of(raw)
    finally:
        store.rm("/pieces", recursive=True)


def test_a_file_that_cannot_be_opened_is_one_piece_with_one_fault(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a"]}), tmp_path / "b.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    source = open_source(Part(path=str(tmp_path)))
    first, second = source.pieces(1)
    (bad,) = source.rows(first)
    assert isinstance(bad, BadRow)
    assert bad.whole_file
    assert str(bad.place) == str(tmp_path / "a.parquet")
    assert [row.values for row in source.rows(second) if isinstance(row, SourceRow)] == [{"text": "a"}]


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
    with raises_error("E-DATA-054"):
        open_source(Data(path=str(tmp_path / "a.jsonl"), separator=END))
