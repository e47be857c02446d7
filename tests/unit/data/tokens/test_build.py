from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_assertions import raises_error
from small_tokenizers import byte_level, saved

from forerun.config.schema import Part
from forerun.data.documents import InMemory, in_memory
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens import unit, worker_pool
from forerun.data.tokens.build import BuildProgress, Limits, build, is_complete
from forerun.data.tokens.recipe import Recipe, is_validation, recipe_for
from forerun.data.tokens.store import INDEX, TokenStore, check, open_store
from forerun.errors import UserError
from forerun.hub.chat.template import CHATML

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
UNIT_BYTES = 2000
PATIENCE_SECONDS = 60  # only a hang takes so long


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "unit_bytes", lambda total: UNIT_BYTES)


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    choose = np.random.default_rng(seed)
    return [
        {name: f"{n} " + " ".join(choose.choice(WORDS, choose.integers(1, 30))) for name in ("prompt", "completion")}
        for n in range(count)
    ]


def write(folder: Path, name: str, lines: list[Any]) -> Source:
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)
    return open_source(Part(path=str(folder)))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    write(tmp_path / "data", "a.jsonl", rows(60))
    return write(tmp_path / "data", "b.jsonl", rows(40, seed=1))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(saved(byte_level(), tmp_path), "digest", 0, 1000, validation=0.2)


def contents(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


def expected(given: list[dict[str, str]], *, kept: bool) -> InMemory:
    """By the library alone."""
    documents, masks = [], []
    for row in given:
        if is_validation(row, 0.2) == kept:
            prompt, completion = (byte_level().encode(row[name]).ids for name in ("prompt", "completion"))
            documents.append([*prompt, *completion, 0])
            masks.append([False] * len(prompt) + [True] * (len(completion) + 1))
    return in_memory(documents, masks)


def test_what_is_read_is_what_the_tokenizer_gives(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    told: list[BuildProgress] = []
    folder = build(source, recipe, tmp_path / "s", workers=2, on_unit=told.append)
    check(folder)
    store = open_store(folder)
    given = rows(60) + rows(40, seed=1)
    assert len(store.train.units) > 5
    assert store.validation is not None
    for kept, found in ((False, store.train), (True, store.validation)):
        wanted = expected(given, kept=kept)
        assert (len(found), found.tokens, found.largest) == (len(wanted), wanted.tokens, wanted.largest)
        every = np.arange(len(wanted) + 1)
        assert found.begins(every).tolist() == wanted.begins(every).tolist()
        assert found.begins(3) == wanted.begins(3)
        sides = [unit["sides"][found.side] for unit in found.units]
        lengths = np.diff(wanted.begins(every))
        assert wanted.learned is not None
        assert max(side["longest"] for side in sides) == lengths.max()
        assert sum(side["single"] for side in sides) == np.count_nonzero(lengths < 2)
        assert (
            sum(side["targets"] for side in sides)
            == wanted.learned.sum() - wanted.learned[wanted.begins(every[:-1])].sum()
        )
        addresses = np.arange(wanted.tokens)
        assert found.holding(addresses).tolist() == wanted.holding(addresses).tolist()
        choose = np.random.default_rng(0)
        ranges = np.sort(choose.integers(0, wanted.tokens + 1, (200, 2)), axis=1).tolist()
        for start, stop in [*ranges, [0, wanted.tokens]]:
            ids, mask = found.read(start, stop)
            assert ids.tolist() == wanted.ids[start:stop].tolist()
            assert wanted.learned is not None
            whole = np.ones(len(ids), np.bool_) if mask is None else mask
            assert whole.tolist() == wanted.learned[start:stop].tolist()
    assert store.counts.documents == store.rows == 100
    assert (told[-1].units_done, told[-1].documents, told[-1].done_bytes) == (told[-1].units, 100, source.size_bytes)
    assert told[-1].tokens == store.counts.tokens
    again = open_store(build(source, recipe, tmp_path / "s", on_unit=told.append))
    assert again.train.digest == store.train.digest


def test_workers_and_shards_give_the_same_bytes(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    one, four = (contents(build(source, recipe, tmp_path / f"w{n}", workers=n)) for n in (1, 4))
    assert one == four
    for shard in (2, 0, 2):
        store = build(source, recipe, tmp_path / "shards", workers=2, shard=(shard, 3))
        assert not is_complete(store)
    with raises_error("E-DATA-104"):
        open_store(store)
    build(source, recipe, tmp_path / "shards", shard=(1, 3))
    assert contents(store) == one


@pytest.mark.timing
def test_a_killed_worker_changes_nothing(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When two units are done. The last ones are handed out only then, so there are workers to kill."""
    killed: list[int] = []
    done, hand_out = threading.Event(), worker_pool.Pool._next

    def next_unit(self: worker_pool.Pool) -> unit.Unit | None:
        one = hand_out(self)
        assert one is None or one.number < 4 or done.wait(PATIENCE_SECONDS)
        return one

    def kill(progress: BuildProgress) -> None:
        if progress.units_done == 2 and not done.is_set():
            killed.extend(children(os.getpid()))
            for process in killed:
                os.kill(process, signal.SIGKILL)
            done.set()

    monkeypatch.setattr(worker_pool.Pool, "_next", next_unit)
    store = build(source, recipe, tmp_path / "killed", workers=2, on_unit=kill)
    assert killed
    assert contents(store) == contents(build(source, recipe, tmp_path / "whole", workers=2))


PARENT = """
import json, sys, threading
from pathlib import Path
from forerun.data.source.sources import Source
from forerun.data.tokens import unit
from forerun.data.tokens.build import build
from forerun.data.tokens.worker_pool import Pool
from forerun.data.tokens.recipe import Recipe
source, recipe, root, size = json.loads(sys.argv[1])
unit.unit_bytes = lambda total: size
hand_out = Pool._next
def next_unit(self):
    one = hand_out(self)
    if one is not None and one.number > 4:
        threading.Event().wait()  # the workers are idle and alive until all are killed
    return one
Pool._next = next_unit
def tell(progress):
    print(progress.units_done, flush=True)
    if progress.units_done == 3:
        sys.stdin.read()
build(Source.from_json(source), Recipe.from_json(recipe), Path(root), workers=2, on_unit=tell)
"""


@pytest.mark.timing
def test_a_killed_build_takes_its_workers_along_and_goes_on_where_it_was(
    source: Source, recipe: Recipe, tmp_path: Path
) -> None:
    root = tmp_path / "killed"
    task = json.dumps([source.to_json(), recipe.to_json(), str(root), UNIT_BYTES])
    command = [sys.executable, "-c", PARENT, task]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.strip() == "3":
                break
        workers = [os.pidfd_open(process) for process in children(parent.pid)]
        parent.kill()
    assert workers
    for worker in workers:
        gone = select.poll()
        gone.register(worker, select.POLLIN)
        assert gone.poll(1000 * PATIENCE_SECONDS), "a worker lives on"
        os.close(worker)
    (store,) = root.iterdir()
    done = {folder: (folder / "unit.json").stat().st_ino for folder in store.glob("unit-*") if folder.suffix != ".part"}
    assert len(done) >= 3
    (store / left_behind("unit-00009-of-00010")).mkdir()
    assert build(source, recipe, root, workers=2) == store
    assert {folder: (folder / "unit.json").stat().st_ino for folder in done} == done
    assert contents(store) == contents(build(source, recipe, tmp_path / "whole", workers=2))
    assert not list(store.glob("*.part"))


def test_a_unit_that_another_build_finishes_at_this_moment_is_kept(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes between two looks of ours: at its summary, and whether it is there."""
    store = build(source, recipe, tmp_path / "s", workers=2)
    (store / INDEX).unlink()
    before = {folder: folder.stat().st_ino for folder in store.glob("unit-*")}
    seen: set[str] = set()

    def late(store: Path, name: str) -> dict[str, Any] | None:
        if name in seen:
            return unit.summary_of(store, name)
        seen.add(name)
        return None

    monkeypatch.setattr("forerun.data.tokens.build.summary_of", late)
    assert build(source, recipe, tmp_path / "s", workers=2) == store
    assert {folder: folder.stat().st_ino for folder in store.glob("unit-*")} == before
    assert len(seen) == len(before) > 5


def left_behind(name: str) -> str:
    """The name of a part whose process is none: no process has an id beyond 4194304."""
    start, writer, end = unit.part_name(name).rsplit(".", 2)
    host, process, token = writer.split("-")
    assert process == str(os.getpid())
    return f"{start}.{host}-4194305-{token}.{end}"


def children(process: int) -> list[int]:
    """Of threads and processes that end meanwhile nothing is told."""
    found, workers = [], []
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    for child in found:
        with suppress(OSError):
            workers += [child] if b"tokens.worker" in Path(f"/proc/{child}/cmdline").read_bytes() else []
    return workers


def spoiled(folder: Path, wrong: dict[int, str]) -> Source:
    lines: list[Any] = list(rows(100))
    for number, line in wrong.items():
        lines[number - 1] = line
    return write(folder, "rows.jsonl", lines)


WRONG = {7: "{", 55: '{"prompt": "x"}', 56: "[]", 90: '{"prompt": 1, "completion": "x"}'}


def test_the_earliest_bad_row_stops_whoever_finds_it_first(recipe: Recipe, tmp_path: Path) -> None:
    for number, workers in ((7, 1), (7, 3), (55, 3)):
        source = spoiled(tmp_path / f"{number}", {at: line for at, line in WRONG.items() if at >= number})
        with pytest.raises(UserError, match=rf"rows\.jsonl, line {number}: "):
            build(source, recipe, tmp_path / f"s{workers}", workers=workers)


def test_bad_rows_within_the_limit_are_passed_over_and_written_down(recipe: Recipe, tmp_path: Path) -> None:
    source = spoiled(tmp_path / "data", WRONG)
    store: TokenStore | None = None
    for limit in (4, 0.04):
        store = open_store(build(source, recipe, tmp_path / "s", workers=2, limits=Limits(rows=limit)))
        assert (store.rows, store.bad, store.counts.documents) == (100, 4, 96)
        assert [bad.place.number for bad in store.skipped] == list(WRONG)
    clean = [row for number, row in enumerate(rows(100), 1) if number not in WRONG]
    assert store is not None
    assert store.train.read(0, store.train.tokens)[0].tolist() == expected(clean, kept=False).ids.tolist()
    for limit in (3, 0.039):
        with raises_error("E-DATA-103", "4", "100") as caught:
            build(source, recipe, tmp_path / "s", limits=Limits(rows=limit))
        assert "line 7" in caught.value.why
        assert "line 56" in caught.value.why
        assert "line 90" not in caught.value.why
        assert caught.value.fix.endswith("data.bad_rows=4")
    with raises_error("E-DATA-042", "7"):
        build(source, recipe, tmp_path / "s")
    with raises_error("E-DATA-103", "3", "data.bad_rows", "2"):
        build(source, recipe, tmp_path / "new", workers=2, limits=Limits(rows=2))


def test_damaged_files(recipe: Recipe, tmp_path: Path) -> None:
    write(tmp_path / "data", "a.jsonl", rows(10))
    (tmp_path / "data" / "b.jsonl.gz").write_bytes(b"\x1f\x8b and no more")
    source = write(tmp_path / "data", "c.jsonl", rows(10, seed=1))
    with raises_error("E-DATA-044", "b.jsonl.gz"):
        build(source, recipe, tmp_path / "s", workers=1)
    store = open_store(build(source, recipe, tmp_path / "s", workers=1, limits=Limits(files=1)))
    assert store.counts.documents == 20
    assert [bad.whole_file for bad in store.skipped] == [True]


def test_the_key_is_the_content(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    def key(**changes: Any) -> str:
        return Recipe(**recipe.to_json() | changes).key(source)

    assert key() == key(tokenizer="elsewhere/tokenizer.json")
    changes = (
        {"tokenizer_digest": "x"}, {"eos": 1}, {"vocab": 5}, {"template": "x"}, {"special": {"bos_token": "x"}},
        {"loss_on": "all"}, {"special_tokens": True}, {"validation": 0.1},
    )  # fmt: skip
    assert len({key(), *(key(**change) for change in changes)}) == 1 + len(changes)
    before = key()
    assert recipe.key(write(tmp_path / "data", "b.jsonl", rows(41, seed=1))) != before


def test_documents_stay_on_their_side_when_the_data_grows(recipe: Recipe, tmp_path: Path) -> None:
    few = rows(50)
    more = [*rows(30, seed=2), *few, *few[:20]]
    kept = []
    for name, given in (("few", few), ("more", more)):
        store = open_store(build(write(tmp_path / name, "a.jsonl", given), recipe, tmp_path / "s", workers=1))
        assert store.validation is not None
        sides = (store.train, store.validation)
        kept.append([{tuple(documents_of(side, n)) for n in range(len(side))} for side in sides])
    (train, validation), (more_train, more_validation) = kept
    assert train <= more_train
    assert validation <= more_validation
    assert not more_train & more_validation
    assert validation


def documents_of(side: Any, number: int) -> list[int]:
    start, stop = side.begins([number, number + 1]).tolist()
    return side.read(start, stop)[0].tolist()  # type: ignore[no-any-return]


def test_chat_from_file_to_store(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "Yes."}]
    source = write(tmp_path / "data", "a.jsonl", [{"messages": chat}] * 3)
    recipe = recipe_for(load_tokenizer(saved(byte_level(), tmp_path)), template=CHATML)
    store = pickle.loads(pickle.dumps(open_store(build(source, recipe, tmp_path / "s", workers=1))))
    text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    wanted = byte_level().encode(text).ids
    ids, mask = store.train.read(0, 3 * len(wanted))
    assert ids.tolist() == wanted * 3
    assert byte_level().decode(ids[mask].tolist(), skip_special_tokens=False) == "Yes.<|im_end|>" * 3
    with raises_error("E-DATA-088"):
        build(source, recipe_for(load_tokenizer("bytes")), tmp_path / "s", workers=1)
