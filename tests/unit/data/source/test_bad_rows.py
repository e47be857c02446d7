from __future__ import annotations

import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.config.schema import Part
from forerun.data.source import files, lines, plain, separated, tables
from forerun.data.source.rows import BadRow, RowPlace, SourceRow
from forerun.data.source.sources import Source, open_source

PYARROW = "pyarrow is not installed (the data extra)"
ROWS, FAULTS, LIMIT_BYTES = 100_000, 1000, 8192


def read(source: Source, piece_bytes: int = 1 << 40) -> tuple[list[str], list[BadRow]]:
    texts, bad = [], []
    for piece in source.pieces(piece_bytes):
        before = source.resolve(piece, RowPlace("", 0)).number or 0  # once: it reads the file up to the piece
        for row in source.rows(piece):
            if isinstance(row, SourceRow):
                texts.append(row.values["text"])
            else:
                number = None if row.place.number is None else row.place.number + before
                bad.append(replace(row, place=row.place._replace(number=number)))
    return texts, bad


def source_of(path: Path) -> Source:
    return open_source(Part(path=str(path)))


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines, separated, tables):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(lines, "BLOCK_BYTES", LIMIT_BYTES)


JSON_FAULTS: list[tuple[bytes, str]] = [
    (b'{"text": "\xff\xfe"}', "not UTF-8"),
    (b'{"text": "cut sh', "invalid JSON"),
    (b'["a", "list"]', "not an object"),
    (b'{"txet": "a"}', "no column 'text'"),
    (b'{"text": null}', "column 'text' holds null, not text"),
    (b'{"text": {"a": 1}}', "column 'text' holds an object, not text"),
    (b'{"text": ""}', "column 'text' holds no text"),
    (b'{"text": " \\n\\t"}', "column 'text' holds no text"),
    (b'{"text": "half \\ud83d"}', "column 'text' holds half a character"),
    (b'{"text": "a", "x": ' + b"[" * 1500 + b"]" * 1500 + b"}", "nested too deeply"),
    (b'{"text": "a", "x": ' + b'{"y":[' * 110 + b"]}" * 110 + b"}", "nested too deeply"),
    (b'{"text": "a", "n": ' + b"9" * 4400 + b"}", "invalid JSON"),
    (b'{"text": "' + b"x" * LIMIT_BYTES + b'"}', "too large"),
]
CSV_FAULTS: list[tuple[bytes, str]] = [
    (b'1,"\xff"', "not UTF-8"),
    (b'1,"a\n\xff\nb"', "not UTF-8"),
    (b'1,"a","b"', "3 fields, the header has 2"),
    (b"1", "1 fields, the header has 2"),
    (b'1,"a"b', "this row cannot be read as csv"),
    (b'1,"never closed', "this row cannot be read as csv"),
    (b"1,return\rinside", "this row cannot be read as csv"),
    (b'1,""', "column 'text' holds no text"),
    (b'1," \t "', "column 'text' holds no text"),
    (b'1,"' + b"x" * LIMIT_BYTES + b'"', "too large"),
]
TABLE_FAULTS: list[tuple[bytes | None, str]] = [
    (None, "column 'text' holds null, not text"),
    (b"", "column 'text' holds no text"),
    (b" \n", "column 'text' holds no text"),
    (b"\xff\xfe", "not UTF-8"),
    (b"cut \xf0\x9f", "not UTF-8"),
    (b"x" * (LIMIT_BYTES + 1), "too large"),
]


def chosen(faults: list[Any]) -> dict[int, Any]:
    """Which rows are bad, and how; the first and the last are among them."""
    rng = random.Random(5)
    places = sorted({1, ROWS, *rng.sample(range(2, ROWS), FAULTS - 2)})
    return {place: faults[at % len(faults)] for at, place in enumerate(places)}


def jsonl_file(path: Path, wrong: dict[int, Any]) -> dict[int, int]:
    with path.open("wb") as out:
        for row in range(1, ROWS + 1):
            out.write((wrong[row][0] if row in wrong else b'{"text": "row %d, gr\xc3\xbcn"}' % row) + b"\n")
    return {row: row for row in wrong}


def csv_file(path: Path, wrong: dict[int, Any]) -> dict[int, int]:
    line, at = 2, {}
    with path.open("wb") as out:
        out.write(b"id,text\n")
        for row in range(1, ROWS + 1):
            record = wrong[row][0] if row in wrong else b'%d,"row %d, gr\xc3\xbcn"' % (row, row)
            out.write(record + b"\n")
            at[row] = line
            line += 1 + record.count(b"\n")
    return {row: at[row] for row in wrong}


def parquet_file(path: Path, wrong: dict[int, Any]) -> dict[int, int]:
    arrow, parquet = pytest.importorskip("pyarrow", reason=PYARROW), pytest.importorskip("pyarrow.parquet")
    held = [wrong[row][0] if row in wrong else b"row %d, gr\xc3\xbcn" % row for row in range(1, ROWS + 1)]
    table = arrow.table({"text": arrow.array(held, arrow.binary()).view(arrow.string())})
    parquet.write_table(table, path, row_group_size=7000)
    return {row: row for row in wrong}


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    ("name", "faults", "write"),
    [
        ("a.jsonl", JSON_FAULTS, jsonl_file),
        ("a.csv", CSV_FAULTS, csv_file),
        ("a.parquet", TABLE_FAULTS, parquet_file),
    ],
)
def test_every_fault_among_100000_rows_is_told_and_the_rest_is_the_clean_remainder(
    tmp_path: Path, name: str, faults: list[Any], write: Callable[[Path, dict[int, Any]], dict[int, int]]
) -> None:
    wrong = chosen(faults)
    numbers = write(tmp_path / name, wrong)
    texts, bad = read(source_of(tmp_path), piece_bytes=300_000)
    word = "row" if name == "a.parquet" else "line"
    assert [each.place for each in bad] == [(str(tmp_path / name), numbers[row], word) for row in wrong]
    for each, (_, what) in zip(bad, wrong.values(), strict=True):
        assert each.what.startswith(what), each
        assert not each.whole_file
        assert str(each.place) in each.error().what
    assert texts == [f"row {row}, grün" for row in range(1, ROWS + 1) if row not in wrong]
    assert {each.what.split(":")[0] for each in bad} == {what for _, what in faults}


def test_a_number_of_many_digits_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b", "n": ' + b"9" * 5000 + b'}\n{"text": "c"}\n')
    texts, (bad,) = read(source_of(tmp_path))
    assert (texts, bad.place.number, bad.what) == (["a", "c"], 2, "invalid JSON")
    assert "4300 digits" in bad.why


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_a_row_that_is_too_large_is_measured_and_never_held(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, huge = 1 << 20, 48 << 20
    for module in (lines, separated):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", limit)
    head, good = (b"text\n", b"a\n") if name == "a.csv" else (b"", b'{"text": "a"}\n')
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wb") as out:
        out.write(head + good)
        for _ in range(huge >> 20):
            out.write(b"x" * (1 << 20))
        out.write(b"\n" + good)
    source = source_of(tmp_path)
    tracemalloc.start()
    texts, (bad,) = read(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == ["a", "a"]
    assert bad.what == f"too large: {huge:,} bytes"
    assert bad.place.number == (3 if head else 2)
    assert peak < huge / 2, "5 MiB, unless another thread is at work"


def test_a_text_file_that_is_empty_or_too_large_is_a_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, raw in (("a", b""), ("b", b" \n"), ("c", b"\xff"), ("d", b"fine"), ("e", b"x" * 11)):
        (tmp_path / f"{name}.txt").write_bytes(raw)
    monkeypatch.setattr(plain, "MAX_TEXT_BYTES", 10)
    texts, bad = read(source_of(tmp_path))
    assert texts == ["fine"]
    said = {"a": "holds no text", "b": "holds no text", "c": "not UTF-8 text", "e": "too large: 11 bytes"}
    assert {Path(each.place.file).stem: each.what for each in bad} == said


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_rows_before_the_damage_of_a_packed_file_are_used(tmp_path: Path, packed: str) -> None:
    rng = random.Random(1)
    wanted = [f"{at} {rng.randbytes(300).hex()}" for at in range(2000)]
    raw = "".join(json.dumps({"text": text}) + "\n" for text in wanted).encode()
    if packed == ".gz":
        whole = gzip.compress(raw)
    else:
        whole = pytest.importorskip("zstandard", reason="zstandard is not installed (the data extra)").compress(raw)
    (tmp_path / f"a.jsonl{packed}").write_bytes(whole[: len(whole) // 2])
    texts, (bad,) = read(source_of(tmp_path))
    assert texts == wanted[: len(texts)]
    assert len(texts) > 600
    assert bad.whole_file
    assert bad.place.number == len(texts)
    assert bad.what == "the file is truncated or damaged after this line"


def test_a_damaged_row_group_ends_its_piece_and_says_where(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow", reason=PYARROW), pytest.importorskip("pyarrow.parquet")
    wanted = [f"text {at}" for at in range(1000)]
    parquet.write_table(arrow.table({"text": wanted}), tmp_path / "a.parquet", row_group_size=100)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    column = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(5).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start : start + 30] = b"\xff" * 30
    (tmp_path / "a.parquet").write_bytes(raw)
    texts, (bad,) = read(source_of(tmp_path))
    assert texts == wanted[:500]
    assert (bad.whole_file, str(bad.place)) == (True, f"{tmp_path / 'a.parquet'}, row 500")
    texts, (bad,) = read(source_of(tmp_path), piece_bytes=1)
    assert texts == wanted[:500] + wanted[600:]
    assert (bad.whole_file, str(bad.place)) == (True, f"{tmp_path / 'a.parquet'}, row 500")


def arrow_stream(texts: list[str]) -> tuple[bytes, list[int]]:
    """A stream, and where each of its batches ends."""
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    out, ends = io.BytesIO(), []
    table = arrow.table({"text": texts})
    with arrow.ipc.new_stream(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
            ends.append(out.tell())
    return out.getvalue(), ends


def test_a_stream_that_was_cut_between_two_batches_is_noticed(tmp_path: Path) -> None:
    wanted = [f"text {at}" for at in range(100)]
    whole, ends = arrow_stream(wanted)
    (tmp_path / "a.arrow").write_bytes(whole)
    assert read(source_of(tmp_path)) == (wanted, [])
    for end in (ends[3], ends[3] + 4, ends[4] - 7):
        (tmp_path / "a.arrow").write_bytes(whole[:end])
        texts, (bad,) = read(source_of(tmp_path))
        assert texts == wanted[:40]
        assert (bad.whole_file, bad.place.number) == (True, 40)


def test_offsets_that_point_outside_are_damage_and_do_not_crash(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    offsets = arrow.py_buffer(b"".join(at.to_bytes(4, "little") for at in (0, 1, 2**30, 3)))
    forged = arrow.Array.from_buffers(arrow.string(), 3, [None, offsets, arrow.py_buffer(b"abc")])
    with arrow.ipc.new_file(str(tmp_path / "a.arrow"), arrow.schema([("text", arrow.string())])) as writer:
        writer.write_batch(arrow.record_batch([forged], names=["text"]))
    texts, (bad,) = read(source_of(tmp_path))
    assert texts == ["a"]
    assert (bad.whole_file, bad.place.number) == (True, 1)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.csv", "a.jsonl.gz"])
def test_whatever_is_flipped_rows_and_faults_come_out_and_nothing_else(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    texts = [f"text {at} " + "é" * (at % 30) for at in range(200)]
    if name == "a.parquet":
        pytest.importorskip("pyarrow.parquet").write_table(
            arrow.table({"text": texts}), tmp_path / name, row_group_size=50
        )
    elif name == "a.csv":
        (tmp_path / name).write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    elif name == "a.jsonl.gz":
        (tmp_path / name).write_bytes(gzip.compress("".join(f'{{"text": "{text}"}}\n' for text in texts).encode()))
    else:
        new = arrow.ipc.new_stream if name == "stream.arrow" else arrow.ipc.new_file
        with new(str(tmp_path / name), arrow.schema([("text", arrow.string())])) as writer:
            writer.write_table(arrow.table({"text": texts}), max_chunksize=50)
    whole, source, rng = (tmp_path / name).read_bytes(), source_of(tmp_path), random.Random(name)
    assert read(source, 1) == (texts, [])
    faults = 0
    for _ in range(40):
        raw = bytearray(whole)
        for at in (rng.randrange(len(raw)) for _ in range(3)):
            raw[at] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(raw)
        found, bad = read(source, 1)
        faults += bool(bad)
        assert len(found) + len(bad) > 0
    assert faults > 0


def test_a_file_without_the_columns_of_the_others_is_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "b.csv").write_text("body\nb\nc\n")
    (tmp_path / "c.csv").write_text('"text\nnever closed\n')
    (tmp_path / "d.csv").write_text("text\n")
    (tmp_path / "e.csv").write_text("text\ne\n")
    texts, bad = read(source_of(tmp_path))
    assert texts == ["a", "e"]
    assert [(Path(each.place.file).name, each.whole_file) for each in bad] == [
        ("b.csv", True), ("c.csv", True), ("d.csv", True),
    ]  # fmt: skip
    assert [each.what for each in bad] == [
        "no column 'text'", "the header: this row cannot be read as csv", "holds no rows",
    ]  # fmt: skip


def test_a_row_that_never_closes_its_quote_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,a\n2,"open\n3,c\n4,d\n5,"e, f"\n6,"open again\n7,g\n')
    texts, bad = read(source_of(tmp_path))
    assert texts == ["a", "c", "d", "e, f", "g"]
    assert [each.place.number for each in bad] == [3, 7]


def test_csv_is_read_as_python_reads_it(tmp_path: Path) -> None:
    rng = random.Random(3)
    made = ["".join(rng.choice('ab",\n\r\té ') for _ in range(rng.randint(1, 12))) + "." for _ in range(2000)]
    for end in ("\n", "\r\n"):
        out = io.StringIO(newline="")
        csv.writer(out, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([["id", "text"], *enumerate(made)])
        (tmp_path / "a.csv").write_bytes(out.getvalue().encode())
        assert read(source_of(tmp_path)) == (made, [])


class _Failing(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise TimeoutError(110, "Connection timed out")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.txt"])
def test_trouble_with_reading_is_no_bad_row(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"a.csv": b"text\na\n", "a.txt": b"a"}.get(name, b'{"text": "a"}\n')
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    source = source_of(tmp_path)
    monkeypatch.setattr(files.File, "open", lambda file: io.BufferedReader(_Failing()))
    with raises_error("E-DATA-028") as caught:
        read(source)
    assert caught.value.why == "Connection timed out"
