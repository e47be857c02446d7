"""`data.shuffle: blocks` of a job: the same rows, extents where neighbouring rows are neighbours, and the identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.config.schema import Data, Part
from forerun.data.corpus import Corpus, Dialect, open_corpus
from forerun.data.order.concatenated import Concatenated
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError
from forerun.hardware.object_storage import BlockSizes
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.restore import require_same_data

SEQUENCE, SIZES = 8, BlockSizes(4, 16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data would have blocks of one row."""
    monkeypatch.setattr(BlockSizes, "of", lambda rows, row_bytes: SIZES)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("a", 300), ("b", 90)):
        rows = (json.dumps({"text": f"{name} document {number}"}) + "\n" for number in range(count))
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def opened(texts: Path, shuffle: Any = "blocks", **given: Any) -> Corpus:
    source = {} if "mixture" in given else {"path": str(texts / "a.jsonl")}
    data = Data(**source, store=str(texts / "store"), shuffle=shuffle, **given)
    return open_corpus(data, Dialect(ByteTokenizer()), sequence=SEQUENCE)


def epoch_of(corpus: Corpus) -> list[bytes]:
    """The rows of an epoch in their order."""
    rows = corpus.rows.drawn(np.arange(len(corpus.rows)), 2)
    return [row.tobytes() for row in corpus.rows.take(rows)["tokens"]]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"packing": "whole"},
        {"validation": 0.1, "validation_by": "rows"},
        {"validation": 0.1},
        {"mixture": True},
    ],
    ids=["concatenated", "whole", "held out by rows", "held out by documents", "mixture"],
)
def test_both_orders_have_the_same_rows(texts: Path, given: dict[str, Any]) -> None:
    if "mixture" in given:
        given = {"mixture": {name: Part(path=str(texts / f"{name}.jsonl")) for name in "ab"}}
    plain, blocks = opened(texts, "rows", **given), opened(texts, "blocks", **given)
    rows, others = epoch_of(plain), epoch_of(blocks)
    assert sorted(rows) == sorted(others)
    assert rows != others
    if plain.kept is not None:
        assert blocks.kept is not None
        assert blocks.kept.order == plain.kept.order
        places = np.arange(len(plain.kept))
        assert blocks.kept.drawn(places, 0).tolist() == plain.kept.drawn(places, 0).tolist()


def extents(corpus: Corpus) -> list[int]:
    return [
        part.rows._documents.extent_tokens if isinstance(part.rows, Concatenated) else -1  # type: ignore[attr-defined]
        for part in corpus.parts
    ]


def test_extents_are_blocks_of_concatenated_documents(texts: Path) -> None:
    assert extents(opened(texts)) == [4 * SEQUENCE]
    assert extents(opened(texts, "rows")) == [0]
    assert extents(opened(texts, packing="whole")) == [-1]
    assert extents(opened(texts, validation=0.1, validation_by="rows")) == [-1]
    assert opened(texts).parts[0].store.train.extent_tokens == 0  # reports read single documents


def test_a_run_is_not_resumed_in_another_order(texts: Path) -> None:
    rows, blocks = opened(texts, "rows"), opened(texts)
    assert rows.digest == f"{rows.rows.digest} feistel-8"
    assert blocks.digest == f"{rows.rows.digest} feistel-8 blocks-1/4/16"
    job: Any = type("Job", (), {"data": Data(path="a.jsonl")})
    require_same_data(ResolvedJob(job), blocks, 5, blocks.digest)
    for now, then in ((rows, blocks), (blocks, rows)):
        with pytest.raises(UserError) as refused:
            require_same_data(ResolvedJob(job), now, 5, then.digest)
        assert refused.value.code == "E-RUN-035"
        assert "data.shuffle" in refused.value.fix
