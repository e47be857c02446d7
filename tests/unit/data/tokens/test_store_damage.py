"""Flipped bytes in a store: each one is found when it is read, and the fix that is named repairs it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level, saved

from forerun.config.schema import Data, Part
from forerun.data.blocks import BLOCK_BYTES, SUFFIX
from forerun.data.corpus import Dialect, open_corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import ByteTokenizer
from forerun.data.tokens import unit
from forerun.data.tokens.build import Limits, build
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.store import INDEX, check, open_store
from forerun.data.tokens.unit import SKIPPED, SUMMARY
from forerun.errors import UserError

SEEDS = 40


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "unit_bytes", lambda total: 40_000)


@pytest.fixture(scope="module")
def rows() -> list[str]:
    chance = np.random.default_rng(0)
    words = [chance.choice(["the", "quick", "brown", "fox"], 40) for _ in range(600)]
    return [json.dumps({"prompt": f"{n}", "completion": " ".join(some)}) for n, some in enumerate(words)] + ["{"]


@pytest.fixture
def source(tmp_path: Path, rows: list[str]) -> Source:
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return open_source(Part(path=str(tmp_path / "a.jsonl")))


@pytest.fixture
def again(source: Source, tmp_path: Path) -> Callable[[], Path]:
    """Builds the store, or what is missing of it."""
    recipe = Recipe(saved(byte_level(), tmp_path), "digest", 0, 1000, validation=0.2)
    return lambda: build(source, recipe, tmp_path / "s", workers=1, limits=Limits(rows=1))


def contents(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


def everything(store: Path) -> list[Any]:
    """All that a run could read of a store, a little at a time."""
    opened = open_store(store)
    assert opened.validation is not None
    found: list[Any] = [list(opened.skipped)]
    for side in (opened.train, opened.validation):
        found.append(side.begins(np.arange(len(side) + 1)).tolist())
        found.append(side.holding(np.arange(0, side.tokens, 50)).tolist())
        found.append([_plain(side.read(n, min(n + 997, side.tokens))) for n in range(0, side.tokens, 997)])
    return found


def _plain(read: tuple[Any, Any]) -> list[Any]:
    return [None if one is None else one.tolist() for one in read]


def flip(file: Path, chance: np.random.Generator) -> int:
    raw = bytearray(file.read_bytes())
    at = int(chance.integers(len(raw)))
    raw[at] ^= 1 << int(chance.integers(8))
    file.write_bytes(raw)
    return at


def run_fix(error: UserError) -> None:
    """Runs the command that the error names."""
    command = shlex.split(error.fix.rsplit(": ", 1)[1])
    assert command[0] == "rm"
    subprocess.run(command, check=True)


KINDS = [
    f"{side}.{what}{end}"
    for side in ("train", "validation")
    for what in ("tokens", "offsets", "learned")
    for end in ("", SUFFIX)
]


def test_a_flipped_byte_of_any_file_is_found_and_the_fix_rebuilds_only_its_unit(again: Callable[[], Path]) -> None:
    store = again()
    before, wanted = contents(store), everything(store)
    units = sorted(folder.name for folder in store.glob("unit-*"))
    assert len(units) > 2
    assert max(len(raw) for name, raw in before.items() if name.endswith(".tokens")) > 2 * BLOCK_BYTES
    chance = np.random.default_rng(1)
    for name in [*KINDS, SKIPPED]:
        files = [file for file in sorted(store.glob(f"unit-*/{name}")) if file.stat().st_size]
        for _ in range(SEEDS // 4):
            file = files[chance.integers(len(files))]
            flip(file, chance)
            with pytest.raises(UserError) as caught:
                everything(store)
            assert caught.value.what.startswith(str(file))
            with pytest.raises(UserError):
                check(store)
            file.write_bytes(before[str(file.relative_to(store))])
        if name not in ("train.tokens", f"validation.offsets{SUFFIX}"):
            continue  # the fix starts a process each time
        flip(file, chance)
        inodes = {one: (store / one).stat().st_ino for one in units}
        with pytest.raises(UserError) as caught:
            everything(store)
        run_fix(caught.value)
        assert again() == store
        assert [one for one in units if (store / one).stat().st_ino != inodes[one]] in ([], [file.parent.name])
        assert contents(store) == before
        assert everything(store) == wanted


def test_other_units_are_still_read(again: Callable[[], Path]) -> None:
    store = again()
    train = open_store(store).train
    wanted = train.read(0, train.tokens)[0].tolist()
    flip(sorted(store.glob("unit-*/train.tokens"))[1], np.random.default_rng(3))
    train = open_store(store).train
    first, second = (one["sides"]["train"]["tokens"] for one in train.units[:2])
    read = 0
    for start in range(0, train.tokens, 500):
        stop = min(start + 500, train.tokens)
        if start < first + second and stop > first:
            with pytest.raises(UserError):
                train.read(start, stop)
        else:
            assert train.read(start, stop)[0].tolist() == wanted[start:stop]
            read += 1
    assert read > 10


@pytest.mark.parametrize("name", [INDEX, SUMMARY])
def test_a_flipped_byte_of_the_index_or_of_a_summary(again: Callable[[], Path], name: str) -> None:
    store = again()
    before, wanted = contents(store), everything(store)
    file = store / INDEX if name == INDEX else sorted(store.glob(f"unit-*/{SUMMARY}"))[1]
    raw, chance = file.read_bytes(), np.random.default_rng(2)
    for _ in range(5 * SEEDS):
        flip(file, chance)
        if name == INDEX:
            with pytest.raises(UserError):
                open_store(store)
        else:
            assert unit.summary_of(store, file.parent.name) is None
        file.write_bytes(raw)
    flip(file, chance)
    with pytest.raises(UserError) as caught:
        check(store)
    run_fix(caught.value)
    assert again() == store
    assert contents(store) == before
    assert everything(store) == wanted


@pytest.fixture
def data(tmp_path: Path, rows: list[str]) -> Data:
    (tmp_path / "b.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    return Data(path=str(tmp_path / "b.jsonl"), store=str(tmp_path / "plans"), workers=1, packing="whole")


def packed(data: Data) -> WholeDocuments:
    (part,) = open_corpus(data, Dialect(ByteTokenizer()), sequence=64).parts
    assert isinstance(part.rows, WholeDocuments)
    return part.rows


def test_a_flipped_byte_of_a_packing_plan(data: Data) -> None:
    rows = packed(data)
    wanted = rows.take(np.arange(len(rows)))["tokens"].tolist()
    (home,) = Path(str(data.store)).glob("*/rows/*")
    before, chance = contents(home), np.random.default_rng(0)
    for name, raw in before.items():
        for _ in range(SEEDS):
            flip(home / name, chance)
            with pytest.raises(UserError) as caught:
                packed(data).take(np.arange(len(rows)))
            assert str(home) in caught.value.what
            (home / name).write_bytes(raw)
    flip(home / "items.bin", chance)
    with pytest.raises(UserError) as caught:
        packed(data).check()
    run_fix(caught.value)
    assert packed(data).take(np.arange(len(rows)))["tokens"].tolist() == wanted
    assert contents(home) == before


def test_a_feed_raises_the_error_before_the_damaged_batch(data: Data) -> None:
    """The batches before it come as they are; the error has its type and is not retried."""
    batches = fed(data)
    wanted = [batches.batch_at(step).tokens.tolist() for step in range(20)]
    (spoiled,) = Path(str(data.store)).glob("*/unit-00001-*/train.tokens")
    flip(spoiled, np.random.default_rng(0))
    found: list[Any] = []
    with (
        Feed(fed(data), lambda batch: found.append(batch.tokens.tolist()), 0, 20) as feed,
        pytest.raises(UserError) as caught,
    ):
        list(feed)
    assert caught.value.what.startswith(str(spoiled))
    assert found == wanted[: len(found)]
    assert len(found) < 20


def fed(data: Data) -> Batches:
    return Batches(open_corpus(data, Dialect(ByteTokenizer()), sequence=64).rows, seed=0, batch=1)
