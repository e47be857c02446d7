"""Token files as the data of a job: the same rows as from text, one end token, and what the user is told."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from forerun.config.schema import Data
from forerun.data.corpus import Corpus, Dialect, open_corpus, packing_of
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError

END = ByteTokenizer.eos
TEXTS = [f"text number {n} is one of many" for n in range(40)]
WITH_END = [[*text.encode(), END] for text in TEXTS]
WITHOUT = [list(text.encode()) for text in TEXTS]
MIXED = [ids if n % 2 else ids[:-1] for n, ids in enumerate(WITH_END)]


def opened(place: Path, **keys: object) -> Corpus:
    data = Data.model_validate({"path": str(place), "tokenizer": "bytes", **keys})
    return open_corpus(data, Dialect(ByteTokenizer()), sequence=16)


def megatron(folder: Path, documents: list[list[int]]) -> Path:
    folder.mkdir()
    lengths = [len(one) for one in documents]
    starts = [2 * sum(lengths[:n]) for n in range(len(lengths))]
    count = len(documents)
    flat = [one for ids in documents for one in ids]
    (folder / "a.bin").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    body = struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *starts, *range(count + 1))
    (folder / "a.idx").write_bytes(head + body)
    return folder


def datatrove(folder: Path, documents: list[list[int]], masks: list[list[int]] | None = None) -> Path:
    folder.mkdir()
    flat = [one for ids in documents for one in ids]
    ends = [sum(map(len, documents[: n + 1])) for n in range(len(documents))]
    (folder / "a.ds").write_bytes(struct.pack(f"<{len(flat)}I", *flat))
    (folder / "a.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if masks is not None:
        (folder / "a.ds.loss").write_bytes(bytes(one for mask in masks for one in mask))
    return folder


def jsonl(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("documents", [WITH_END, WITHOUT, MIXED], ids=["with", "without", "mixed"])
def test_tokens_of_any_file_are_those_of_the_text_and_end_once(tmp_path: Path, documents: list[list[int]]) -> None:
    texts = opened(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    for made in (megatron(tmp_path / "m", documents), datatrove(tmp_path / "d", documents)):
        found = opened(made)
        assert found.digest == texts.digest
        assert len(found.rows) == len(texts.rows), "packed as text"
        store = found.parts[0].store.train
        borders = store.begins(range(len(TEXTS) + 1)).tolist()
        assert [store.read(a, b)[0].tolist() for a, b in pairwise(borders)] == WITH_END
        ended = sum(ids[-1] == END for ids in documents)
        assert found.parts[0].rendering.startswith(f"{ended} of the first 40 documents end with the end token 256")


def test_the_same_documents_are_held_out_as_from_rows_of_ids(tmp_path: Path) -> None:
    rows = opened(
        jsonl(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in WITH_END]), validation=0.3, packing="whole"
    )
    file = opened(megatron(tmp_path / "m", WITH_END), validation=0.3, packing="whole")
    assert rows.digest == file.digest
    held = [corpus.parts[0].store.validation for corpus in (rows, file)]
    assert 0 < len(held[0]) == len(held[1]) < len(TEXTS)


def test_a_loss_mask_is_used_and_keeps_documents_whole(tmp_path: Path) -> None:
    masks = [[0] * 5 + [1] * (len(ids) - 5) for ids in WITH_END]
    rows = [{"input_ids": ids, "loss_mask": mask} for ids, mask in zip(WITH_END, masks, strict=True)]
    file, made = datatrove(tmp_path / "d", WITH_END, masks), jsonl(tmp_path / "a.jsonl", rows)
    assert opened(file).digest == opened(made).digest
    assert packing_of(Data(path="x"), opened(file).parts[0].source) == "whole"


def test_another_common_last_id_is_noted(tmp_path: Path) -> None:
    found = opened(megatron(tmp_path / "m", [[*ids, 10] for ids in WITHOUT]))
    (note,) = found.parts[0].notes
    assert "end token 256" in note
    assert not opened(megatron(tmp_path / "n", WITH_END)).parts[0].notes


def test_ids_need_a_tokenizer_and_must_be_in_its_vocabulary(tmp_path: Path) -> None:
    place = megatron(tmp_path / "m", [*WITH_END, [300, END]])
    with pytest.raises(UserError) as caught:
        opened(place)
    assert caught.value.code == "E-DATA-097"
    assert "document 41" in caught.value.what
    with pytest.raises(UserError) as caught:
        open_corpus(Data(path=str(place)), Dialect(ByteTokenizer()), sequence=16, vocab=50_000)
    assert caught.value.code == "E-DATA-003"
