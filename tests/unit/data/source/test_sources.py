from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error
from pydantic import ValidationError

from forerun.config import addresses
from forerun.config.schema import Data
from forerun.data.source.hub import Dataset
from forerun.data.source.kinds import KINDS
from forerun.data.source.rows import BadRow
from forerun.data.source.sources import Source, open_source
from forerun.errors import UserError
from forerun.installation import install_command

TEXTS = [
    "plain words",
    "two\nlines and\r\na third",
    'quotes " and "" and , and \t tab',
    "Grüße, 世界, 🎉, e\u0301",
    "line\u2028separator and \x85 next line",
    "x" * 200_000,  # longer than csv's own limit for a field
]
PYARROW = "pyarrow is not installed (the data extra)"
ZSTANDARD = "zstandard is not installed (the data extra)"


def texts(source: Source) -> Iterator[str]:
    """Every text; the first bad row is raised."""
    for piece in source.pieces(1 << 62):
        for row in source.rows(piece):
            if isinstance(row, BadRow):
                raise row.error()
            yield row.values["text"]


def texts_of(path: Path | str, **columns: str) -> list[str]:
    return list(texts(open_source(Data(path=str(path), columns=columns))))


def refused(path: Path | str, **columns: str) -> UserError:
    with pytest.raises(UserError) as caught:
        texts_of(path, **columns)
    return caught.value


def as_jsonl(texts: list[str], column: str = "text", *, escaped: bool = False) -> bytes:
    rows = (json.dumps({"id": at, column: text}, ensure_ascii=escaped) for at, text in enumerate(texts))
    return "".join(f"{row}\n" for row in rows).encode()


def as_csv(texts: list[str], column: str = "text", delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["id", column], *([at, text] for at, text in enumerate(texts))])
    return out.getvalue().encode()


def as_parquet(texts: list[str], column: str = "text", kind: str = "string") -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow", reason=PYARROW), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    table = arrow.table({"id": list(range(len(texts))), column: arrow.array(texts, kind)})
    parquet.write_table(table, out, row_group_size=2)
    return out.getvalue()


def as_arrow(texts: list[str], *, stream: bool = False) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    table = arrow.table({"text": texts})
    out = io.BytesIO()
    with (arrow.ipc.new_stream if stream else arrow.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


def as_zst(raw: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason=ZSTANDARD)
    half = len(raw) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (raw[:half], raw[half:]))


WRITERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: as_jsonl(TEXTS),
    "b.jsonl": lambda: as_jsonl(TEXTS, escaped=True),
    "a.json": lambda: as_jsonl(TEXTS),
    "a.ndjson": lambda: as_jsonl(TEXTS),
    "a.JSONL.GZ": lambda: gzip.compress(as_jsonl(TEXTS)),
    "a.jsonl.zst": lambda: as_zst(as_jsonl(TEXTS)),
    "a.csv": lambda: as_csv(TEXTS),
    "a.csv.gz": lambda: gzip.compress(as_csv(TEXTS)),
    "a.tsv": lambda: as_csv(TEXTS, delimiter="\t"),
    "a.parquet": lambda: as_parquet(TEXTS),
    "b.parquet": lambda: as_parquet(TEXTS, kind="large_string"),
    "a.arrow": lambda: as_arrow(TEXTS),
    "stream.arrow": lambda: as_arrow(TEXTS, stream=True),
    "a.feather": lambda: as_arrow(TEXTS),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_back_the_texts_that_were_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WRITERS[name]())
    assert texts_of(tmp_path / name) == TEXTS
    assert texts_of(tmp_path) == TEXTS


@pytest.mark.parametrize("name", ["a.txt.gz", "a.md.zst"])
def test_packed_text_is_one_document(tmp_path: Path, name: str) -> None:
    raw = "one\ntwo é\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else as_zst(raw))
    assert texts_of(tmp_path) == ["one\ntwo é\n"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_blank_lines_line_ends_and_a_byte_order_mark_are_no_rows(tmp_path: Path, end: bytes) -> None:
    rows = end.join([b'{"text": "a"}', b"", b"  ", b'{"text": "b\\n"}'])
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + end.join([b"text,n", b"", b'"a",1', b'"b\n",2', b""]))
    assert texts_of(tmp_path / "a.jsonl") == texts_of(tmp_path / "a.csv") == ["a", "b\n"]


def test_files_come_in_sorted_order_from_a_folder_and_from_a_glob(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", "a/b.jsonl.gz", ".hidden.jsonl", ".git/x.jsonl", "skip.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        raw = as_jsonl([name])
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert texts_of(tmp_path) == ["a/b.jsonl.gz", "a/z.jsonl", "b.jsonl"]
    assert texts_of(tmp_path / "**/*.jsonl") == ["a/z.jsonl", "b.jsonl"]
    assert texts_of(tmp_path / "a/?.jsonl*") == ["a/b.jsonl.gz", "a/z.jsonl"]
    assert open_source(Data(path=str(tmp_path))).recognised == "3 files, jsonl, column text"
    assert "no file matches" in refused(tmp_path / "*.csv").why


def test_nothing_is_read_beyond_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["one"]) + b"not json\n")
    found = texts(open_source(Data(path=str(tmp_path))))
    assert next(found) == "one"
    with raises_error("E-DATA-042", "a.jsonl,", "2"):
        next(found)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt.gz"])
@pytest.mark.parametrize("kept", [0.4, 0.99])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, name: str, kept: float) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(32, 127, 999))) for _ in range(300)]
    pack = {"gz": gzip.compress, "zst": as_zst}.get(name.rsplit(".", 1)[-1], bytes)
    made = {"parquet": as_parquet, "arrow": as_arrow}.get(name.rsplit(".", 1)[-1], as_jsonl)
    whole = pack(made(texts))
    (tmp_path / name).write_bytes(whole[: int(len(whole) * kept)])
    error = refused(tmp_path)
    assert error.what.startswith(str(tmp_path / name))
    assert "the file is truncated or damaged" in error.what


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow", reason=PYARROW)
    if name.endswith(".zst"):
        pytest.importorskip("zstandard", reason=ZSTANDARD)
    (tmp_path / name).write_bytes(b"<html>404 not found</html>" * 9)
    assert refused(tmp_path).what == f"{tmp_path / name}: the file is truncated or damaged"


def test_a_dictionary_of_strings_is_text_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason=PYARROW)
    feather = pytest.importorskip("pyarrow.feather")
    words = arrow.array(["a", "b", "a"])
    feather.write_feather(arrow.table({"text": words.dictionary_encode()}), str(tmp_path / "a.feather"))
    assert texts_of(tmp_path) == ["a", "b", "a"]
    with arrow.ipc.new_file(str(tmp_path / "a.feather"), arrow.schema([("text", words.type)] * 2)) as writer:
        writer.write_table(arrow.Table.from_arrays([words, words], names=["text", "text"]))
    assert "two columns 'text'" in refused(tmp_path).what


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_the_text_column_may_have_another_name(tmp_path: Path, name: str) -> None:
    write = {"a.jsonl": as_jsonl, "a.csv": as_csv, "a.parquet": as_parquet}[name]
    (tmp_path / name).write_bytes(write(TEXTS, "content"))
    assert texts_of(tmp_path, text="content") == TEXTS
    assert "no column 'contant'" in refused(tmp_path, text="contant").what
    assert "data.columns.text=content" in refused(tmp_path, text="contant").fix


def test_an_unknown_column_role_and_columns_of_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="unknown 'txt'; use one of these: text, messages"):
        Data(path="x", columns={"txt": "content"})
    (tmp_path / "a.txt").write_text("x")
    assert "plain text has no columns" in refused(tmp_path, text="content").what


def test_a_folder_of_two_kinds_is_refused_with_a_glob_that_mends_it(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(as_jsonl([name]))
    (tmp_path / "README.md").write_text("about")
    error = refused(tmp_path)
    assert "2 kinds" in error.what
    assert error.why == "2 jsonl, 1 text: for example README.md, b.jsonl"
    assert texts_of(error.fix.split("'")[1]) == ["a.jsonl", "b.jsonl"]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(as_jsonl(["c"])))
    assert texts_of(refused(tmp_path / "*").fix.split("'")[1]) == ["a.jsonl", "b.jsonl", "c"]


def test_packed_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    assert refused(tmp_path).fix == f"gunzip {tmp_path / 'a.parquet.gz'}"


@pytest.mark.parametrize(
    ("name", "module"),
    [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.jsonl.zst", "zstandard"), ("gs://a", "fsspec.core")],
)
def test_a_missing_library_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    (tmp_path / "a.arrow").write_bytes(b"x")
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    error = refused(name if "://" in name else tmp_path / name)
    assert f"needs {module.split('.')[0]}" in error.what
    assert error.fix == install_command("data")


def test_an_address_is_read_through_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "DATA_PROTOCOLS", (*addresses.DATA_PROTOCOLS, "memory"))
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed (the data extra)")
    store = fsspec.filesystem("memory")
    store.pipe({"/sources/b.jsonl.gz": gzip.compress(as_jsonl(["b"])), "/sources/a.jsonl": as_jsonl(["a"])})
    try:
        assert texts_of("memory://sources") == ["a", "b"]
        assert texts_of("memory://sources/*.gz") == texts_of("memory://sources/b.jsonl.gz") == ["b"]
        assert "cannot be read" in refused("memory://sources/c.jsonl").what
    finally:
        store.rm("/sources", recursive=True)


def test_the_page_names_every_ending_and_shows_the_error_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "how-to" / "data.md").read_text()
    assert {ending for ending in KINDS if ending} <= set(re.findall(r"`(\.\w+)`", page))
    monkeypatch.chdir(tmp_path)
    Path("stories").mkdir()
    Path("stories/2.jsonl").write_bytes(as_jsonl(["a"] * 6) + as_jsonl(["b"], "txt"))
    assert f"```text\n{refused('stories/*.jsonl')}\n```" in page


def test_a_name_of_two_parts_that_is_not_there_may_be_a_dataset(tmp_path: Path) -> None:
    assert refused(tmp_path / "owner/name").fix.endswith("data.path=hf://datasets/owner/name")
    assert "hf://" not in refused(tmp_path / "owner/name.jsonl").fix
    assert "hf://" not in refused(tmp_path / "name").fix


def test_a_dataset_by_name_is_its_files_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(["b"]))
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["a"]))
    asked: list[str] = []

    def dataset(place: str, enough: object) -> Dataset:
        assert enough is None
        asked.append(place)
        return Dataset((tmp_path / "a.jsonl", tmp_path / "b.jsonl"), "commit")

    monkeypatch.setattr("forerun.data.source.files.dataset", dataset)
    assert texts_of("hf://datasets/owner/name") == ["a", "b"]
    assert asked == ["hf://datasets/owner/name"]
