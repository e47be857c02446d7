"""Files of token ids, written by datatrove and byte by byte as Megatron's index is specified."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.config.schema import Data, Part
from forerun.data.corpus import Corpus, Dialect, open_corpus, packing_of
from forerun.data.source import token_files
from forerun.data.source.rows import BadRow, SourceRow
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError

END = 7
DOCUMENTS = [[n % 50, *range(n % 9), END] for n in range(300)]
CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8, "float32": 7}


def megatron_index(lengths: list[int], marks: list[int], dtype: str = "uint16", **changes: Any) -> bytes:
    """The bytes of an index: header, version, type, counts, then lengths, pointers and documents."""
    size = np.dtype(dtype).itemsize
    pointers = [sum(lengths[:n]) * size for n in range(len(lengths))] if len(lengths) < 1000 else changes["pointers"]
    head = changes.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<Q", changes.get("version", 1))
    head += struct.pack("<BQQ", CODES[dtype], len(lengths), len(marks))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    return head + body + struct.pack(f"<{len(marks)}q", *marks) + changes.get("modes", b"")


def write_megatron(
    folder: Path, texts: list[list[int]], dtype: str = "uint16", name: str = "a", **changes: Any
) -> Path:
    """Write documents of one sequence each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.bin").write_bytes(np.array([one for text in texts for one in text], dtype).tobytes())
    index = megatron_index([len(text) for text in texts], list(range(len(texts) + 1)), dtype, **changes)
    (folder / f"{name}.idx").write_bytes(index)
    return folder / f"{name}.bin"


def write_datatrove(folder: Path, texts: list[list[int]], size: int = 2, masks: Any = None, name: str = "a") -> Path:
    """Write documents with datatrove's own writer."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(folder), f"{name}.ds", save_final_metadata=True, token_size=size, tokenizer_name_or_path="gpt2",
        save_loss_metadata=masks is not None,
    )  # fmt: skip
    for n, text in enumerate(texts):
        file.write(text, None if masks is None else np.array(masks[n]))
    file.close()
    return folder / f"{name}.ds"


WRITERS = {"megatron": write_megatron, "datatrove": write_datatrove}


def read(source: Source, piece_bytes: int = 1 << 40) -> tuple[list[list[int]], list[BadRow]]:
    good: list[list[int]] = []
    bad: list[BadRow] = []
    for piece in source.pieces(piece_bytes):
        for row in source.rows(piece):
            bad.append(row) if isinstance(row, BadRow) else good.append(row.values["input_ids"].tolist())
    return good, bad


def source_of(place: Path | str) -> Source:
    return open_source(Part(path=str(place)))


def code_of(place: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        source_of(place)
    return str(caught.value.code)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("wide", [False, True])
def test_every_document_is_read_once_in_pieces_of_any_size(tmp_path: Path, kind: str, wide: bool) -> None:
    texts = [[*text[:-1], 70_000, END] for text in DOCUMENTS] if wide else DOCUMENTS
    options = {"megatron": ("int32" if wide else "uint16",), "datatrove": (4 if wide else 2,)}
    file = WRITERS[kind](tmp_path, texts, *options[kind])  # type: ignore[operator]
    source = source_of(tmp_path)
    assert (source.form, source.kind, [one.path for one in source.files]) == ("input_ids", kind, [str(file)])
    for piece_bytes in (1, 500, file.stat().st_size):
        assert read(source, piece_bytes) == (texts, [])
    assert len(source.pieces(500)) > 5
    assert len(source.pieces(1)) == len(texts)
    assert read(Source.from_json(source.to_json()))[0] == texts, "another process reads the same"


def test_small_blocks_of_the_index_and_of_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_INDEX_DOCUMENTS", 7)
    monkeypatch.setattr(token_files, "_READ_BYTES", 40)
    monkeypatch.setattr(token_files, "_MAX_SEQUENCES", 3)
    write_megatron(tmp_path / "m", DOCUMENTS)
    write_datatrove(tmp_path / "d", DOCUMENTS)
    assert read(source_of(tmp_path / "m"), 900) == read(source_of(tmp_path / "d"), 900) == (DOCUMENTS, [])


@pytest.mark.parametrize("limit", [1 << 20, 2])
def test_the_sequences_of_a_megatron_document_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(token_files, "_MAX_SEQUENCES", limit)
    marks = [0, 1, 6, 6, 8]
    (tmp_path / "a.bin").write_bytes(np.arange(36, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(megatron_index([1, 2, 3, 4, 5, 6, 7, 8], marks))
    for piece_bytes in (1, 1 << 20):
        good, bad = read(source_of(tmp_path), piece_bytes)
        assert good == [[0], list(range(1, 21)), list(range(21, 36))]
        assert [one.code for one in bad] == ["E-DATA-221"]


def test_datatrove_writes_megatron_files_that_are_read(tmp_path: Path) -> None:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    for size in (2, 4):
        file = MegatronTokenizedFile(str(tmp_path), f"a{size}", token_size=size)
        for text in DOCUMENTS:
            file.write(text)
        file.close()
        assert read(source_of(tmp_path / f"a{size}.bin"), 700) == (DOCUMENTS, [])


@pytest.mark.torch
def test_datatrove_reads_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from datatrove.utils.dataset import DatatroveFileDataset

    file = write_datatrove(tmp_path, DOCUMENTS)
    stream = [one for text in read(source_of(tmp_path))[0] for one in text]
    rows = DatatroveFileDataset(str(file), 15)
    assert [one for n in range(len(rows)) for one in rows[n]["input_ids"].tolist()] == stream[: len(rows) * 16]


def test_a_loss_mask_is_read_with_its_document(tmp_path: Path) -> None:
    masks = [[n % 3 > 0 for n, _ in enumerate(text)] for text in DOCUMENTS]
    write_datatrove(tmp_path, DOCUMENTS, masks=masks)
    source = source_of(tmp_path)
    every = [row for piece in source.pieces(600) for row in source.rows(piece)]
    found = [row.values["loss_mask"].tolist() for row in every if isinstance(row, SourceRow)]
    assert found == [[int(one) for one in mask] for mask in masks]
    (tmp_path / "a.ds.loss").write_bytes(b"\x02" * (tmp_path / "a.ds.loss").stat().st_size)
    assert [one.code for one in read(source)[1]] == ["E-DATA-220"]
    (tmp_path / "a.ds.loss").write_bytes(b"\x01")
    assert code_of(tmp_path) == "E-DATA-219"


@pytest.mark.parametrize("kind", WRITERS)
def test_places_that_name_token_files(tmp_path: Path, kind: str) -> None:
    texts = {"a": DOCUMENTS[:3], "b": DOCUMENTS[3:5]}
    for name, some in texts.items():
        WRITERS[kind](tmp_path / "x", some, name=name)  # type: ignore[operator]
    every = texts["a"] + texts["b"]
    data, index = {"megatron": (".bin", ".idx"), "datatrove": (".ds", ".ds.index")}[kind]
    for place in ("x", "x/*", f"x/*{data}", f"x/*{index}", "**/*"):
        assert read(source_of(tmp_path / place))[0] == every, place
    for place in (f"x/b{data}", f"x/b{index}", "x/b*"):
        assert read(source_of(tmp_path / place))[0] == texts["b"], place
    (tmp_path / "x" / f"a{index}").unlink()
    assert read(source_of(tmp_path / "x"))[0] == texts["b"], "the form of the first good file is used"
    assert [one.code for one in read(source_of(tmp_path / "x"))[1]] == ["E-DATA-215"]
    WRITERS[kind](tmp_path / "x", texts["a"], name="a")  # type: ignore[operator]
    (tmp_path / "x" / f"a{data}").unlink()
    assert code_of(tmp_path / "x") == "E-DATA-028", "an index without data is not overlooked"


def test_weights_in_a_folder_of_texts_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert code_of(tmp_path) == "E-DATA-035"
    (tmp_path / "a.txt").write_text("text")
    assert source_of(tmp_path).kind == "text"
    assert code_of(tmp_path / "*.bin") == "E-DATA-215"


def test_keys_that_do_not_apply(tmp_path: Path) -> None:
    file = write_megatron(tmp_path, DOCUMENTS)
    for part, code in ((Part(path=str(file), columns={"text": "a"}), "E-DATA-053"), (Part(path=str(file), separator="|"), "E-DATA-054")):  # fmt: skip # noqa: E501
        with pytest.raises(UserError) as caught:
            open_source(part)
        assert caught.value.code == code
    file.rename(tmp_path / "a.bin.gz")
    assert code_of(tmp_path / "a.bin.gz") == "E-DATA-026"


def cut(file: Path, count: int = 1) -> None:
    file.write_bytes(file.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        ("megatron", lambda file: cut(file, 2), "E-DATA-219"),
        ("megatron", lambda file: file.write_bytes(file.read_bytes() + b"\0\0"), "E-DATA-219"),
        ("megatron", lambda file: cut(file.with_suffix(".idx")), "E-DATA-219"),
        ("megatron", lambda file: file.with_suffix(".idx").write_bytes(b"MMIDIDX"), "E-DATA-219"),
        ("megatron", lambda file: file.with_suffix(".idx").write_bytes(b"TNTIDX" + bytes(99)), "E-DATA-216"),
        ("megatron", lambda file: write_megatron(file.parent, DOCUMENTS, version=2), "E-DATA-216"),
        ("megatron", lambda file: write_megatron(file.parent, DOCUMENTS, "float32"), "E-DATA-217"),
        ("megatron", lambda file: write_megatron(file.parent, DOCUMENTS, modes=bytes(len(DOCUMENTS))), "E-DATA-218"),
        ("megatron", lambda file: file.with_suffix(".idx").unlink(), "E-DATA-215"),
        ("datatrove", lambda file: cut(file, 2), "E-DATA-219"),
        ("datatrove", lambda file: file.write_bytes(file.read_bytes() * 2), "E-DATA-219"),
        ("datatrove", lambda file: cut(Path(f"{file}.index"), 4), "E-DATA-219"),
        ("datatrove", lambda file: cut(Path(f"{file}.index"), 8), "E-DATA-219"),
        ("datatrove", lambda file: Path(f"{file}.index").unlink(), "E-DATA-215"),
        ("datatrove", lambda file: Path(f"{file}.metadata").write_text("gpt2|4\n9\n9 T"), "E-DATA-219"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, kind: str, change: Any, code: str) -> None:
    change(WRITERS[kind](tmp_path, DOCUMENTS))  # type: ignore[operator]
    assert code_of(tmp_path) == code or code_of(tmp_path / "*.bin") == code


@pytest.mark.parametrize("kind", WRITERS)
def test_a_changed_number_in_the_index_gives_no_wrong_document(tmp_path: Path, kind: str) -> None:
    """Whatever number is changed: the documents before it are right, and the file is reported."""
    file = WRITERS[kind](tmp_path, DOCUMENTS)  # type: ignore[operator]
    source = source_of(tmp_path)
    index = file.with_suffix(".idx") if kind == "megatron" else Path(f"{file}.index")
    whole = index.read_bytes()
    first = 34 if kind == "megatron" else 0
    for at in range(first, len(whole) - 8, 101):
        changed = bytearray(whole)
        changed[at] ^= 0x55
        index.write_bytes(changed)
        good, bad = read(source, 300)
        assert len(good) < len(DOCUMENTS)
        assert {one.code for one in bad if one.whole_file} & {"E-DATA-219", "E-DATA-220"}
        if kind == "megatron":  # lengths and pointers are both stored, so a wrong border cannot pass
            assert all(text in DOCUMENTS for text in good)


def test_empty_shards(tmp_path: Path) -> None:
    write_datatrove(tmp_path, [], name="a")
    write_datatrove(tmp_path, DOCUMENTS, name="b")
    assert read(source_of(tmp_path)) == (DOCUMENTS, []), "datatrove says that the shard has no tokens"
    (tmp_path / "a.ds.metadata").unlink()
    assert [one.code for one in read(source_of(tmp_path))[1]] == ["E-DATA-045"]
    write_megatron(tmp_path / "m", [])
    assert [one.code for one in read(source_of(tmp_path / "m"))[1]] == ["E-DATA-045"]


def test_empty_and_huge_documents_are_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(token_files, "_READ_BYTES", 40)
    texts = [[1, END], [], [3] * 60, [4, END]]
    for kind, write in WRITERS.items():
        write(tmp_path / kind, texts)  # type: ignore[operator]
        good, bad = read(source_of(tmp_path / kind))
        assert good == [[1, END], [4, END]]
        assert [(one.code, one.place.number, one.place.word) for one in bad] == [
            ("E-DATA-221", 2, "document"), ("E-DATA-068", 3, "document"),
        ]  # fmt: skip
        source = source_of(tmp_path / kind)
        last = source.pieces(1)[-1]
        assert [source.resolve(last, row.place).number for row in source.rows(last)] == [4]


def test_the_identity_is_that_of_all_files(tmp_path: Path) -> None:
    write_megatron(tmp_path, [[1, 2], [3, 4]])
    before = source_of(tmp_path).identities()
    assert source_of(tmp_path).identities() == before
    (tmp_path / "a.idx").write_bytes(megatron_index([2, 2], [0, 2]))
    assert read(source_of(tmp_path))[0] == [[1, 2, 3, 4]]
    assert source_of(tmp_path).identities() != before
    write_datatrove(tmp_path / "d", [[1, 2]], masks=[[True, True]])
    before = source_of(tmp_path / "d").identities()
    (tmp_path / "d" / "a.ds.loss").write_bytes(b"\x01\x00")
    assert source_of(tmp_path / "d").identities() != before


@pytest.mark.parametrize("kind", WRITERS)
def test_a_large_file_is_not_in_memory(tmp_path: Path, kind: str) -> None:
    count, length = 40_000, 1000
    data, index = {"megatron": (".bin", ".idx"), "datatrove": (".ds", ".ds.index")}[kind]
    with (tmp_path / f"a{data}").open("wb") as file:
        os.truncate(file.fileno(), count * length * 2)  # 80 MB without blocks on the disk
    if kind == "megatron":
        pointers = (np.arange(count) * length * 2).tolist()
        made = megatron_index([length] * count, list(range(count + 1)), pointers=pointers)
    else:
        made = (np.arange(1, count + 1, dtype="<u8") * length).tobytes()
    (tmp_path / f"a{index}").write_bytes(made)
    source = source_of(tmp_path)
    tracemalloc.start()
    seen = 0
    for piece in source.pieces(1 << 62):
        seen += sum(len(row.values["input_ids"]) for row in source.rows(piece) if isinstance(row, SourceRow))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == count * length
    assert peak < 24 << 20, f"{peak:,} bytes"


# ---- Token files as the data of a job: the same rows as from text ----

BYTE_END = ByteTokenizer.eos
TEXTS = [f"text number {n} is one of many" for n in range(40)]
WITH_END = [[*text.encode(), BYTE_END] for text in TEXTS]
WITHOUT = [list(text.encode()) for text in TEXTS]
MIXED = [ids if n % 2 else ids[:-1] for n, ids in enumerate(WITH_END)]


def opened(place: Path, **keys: object) -> Corpus:
    data = Data.model_validate({"path": str(place), "tokenizer": "bytes", **keys})
    return open_corpus(data, Dialect(ByteTokenizer()), sequence=16)


def megatron_folder(folder: Path, documents: list[list[int]]) -> Path:
    return write_megatron(folder, documents).parent


def datatrove_folder(folder: Path, documents: list[list[int]], masks: list[list[int]] | None = None) -> Path:
    return write_datatrove(folder, documents, masks=masks).parent


def jsonl(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("documents", [WITH_END, WITHOUT, MIXED], ids=["with", "without", "mixed"])
def test_tokens_of_any_file_are_those_of_the_text_and_end_once(tmp_path: Path, documents: list[list[int]]) -> None:
    texts = opened(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    for made in (megatron_folder(tmp_path / "m", documents), datatrove_folder(tmp_path / "d", documents)):
        found = opened(made)
        assert found.digest == texts.digest
        assert len(found.rows) == len(texts.rows), "packed as text"
        store = found.parts[0].store.train
        borders = store.begins(range(len(TEXTS) + 1)).tolist()
        assert [store.read(a, b)[0].tolist() for a, b in pairwise(borders)] == WITH_END
        ended = sum(ids[-1] == BYTE_END for ids in documents)
        assert found.parts[0].rendering.startswith(f"{ended} of the first 40 documents end with the end token 256")


def test_the_same_documents_are_held_out_as_from_rows_of_ids(tmp_path: Path) -> None:
    rows = opened(
        jsonl(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in WITH_END]), validation=0.3, packing="whole"
    )
    file = opened(megatron_folder(tmp_path / "m", WITH_END), validation=0.3, packing="whole")
    assert rows.digest == file.digest
    held = [corpus.parts[0].store.validation for corpus in (rows, file)]
    assert 0 < len(held[0]) == len(held[1]) < len(TEXTS)


def test_a_loss_mask_is_used_and_keeps_documents_whole(tmp_path: Path) -> None:
    masks = [[0] * 5 + [1] * (len(ids) - 5) for ids in WITH_END]
    rows = [{"input_ids": ids, "loss_mask": mask} for ids, mask in zip(WITH_END, masks, strict=True)]
    file, made = datatrove_folder(tmp_path / "d", WITH_END, masks), jsonl(tmp_path / "a.jsonl", rows)
    assert opened(file).digest == opened(made).digest
    assert packing_of(Data(path="x"), opened(file).parts[0].source) == "whole"


def test_another_common_last_id_is_noted(tmp_path: Path) -> None:
    found = opened(megatron_folder(tmp_path / "m", [[*ids, 10] for ids in WITHOUT]))
    (note,) = found.parts[0].notes
    assert "end token 256" in note
    assert not opened(megatron_folder(tmp_path / "n", WITH_END)).parts[0].notes


def test_ids_need_a_tokenizer_and_must_be_in_its_vocabulary(tmp_path: Path) -> None:
    place = megatron_folder(tmp_path / "m", [*WITH_END, [300, BYTE_END]])
    with pytest.raises(UserError) as caught:
        opened(place)
    assert caught.value.code == "E-DATA-097"
    assert "document 41" in caught.value.what
    with pytest.raises(UserError) as caught:
        open_corpus(Data(path=str(place)), Dialect(ByteTokenizer()), sequence=16, vocab=50_000)
    assert caught.value.code == "E-DATA-003"
