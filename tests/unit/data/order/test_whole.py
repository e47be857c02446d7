"""Whole documents in rows: the bins of the plain algorithm, no token lost, every policy as it says."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.data.documents import InMemory, in_memory
from forerun.data.order import packing, whole_documents
from forerun.data.order.packing import KEY, first_fit_decreasing, window_size
from forerun.data.order.permutation import permuted
from forerun.data.order.rows import FIELDS
from forerun.data.order.whole_documents import WholeDocuments

POLICIES = ("split", "keep_start", "keep_end", "drop")


def numbered(lengths: list[int], learned: np.ndarray | None = None) -> InMemory:
    """Documents of these lengths with tokens 1, 2, 3 ... so that each is known by its value."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return InMemory(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets, learned)


def plain_bins(lengths: list[int], room: int) -> list[list[int]]:
    """First-fit-decreasing as in the textbook; the items' numbers in each bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, space in enumerate(left):
            if space >= lengths[item]:
                bins[number].append(item)
                left[number] -= lengths[item]
                break
        else:
            bins.append([item])
            left.append(room - lengths[item])
    return bins


def plain_rows(documents: InMemory, S: int, too_long: str, window: int) -> list[list[tuple[int, int, int]]]:
    """(document, first position, positions) of each item of each row."""
    order = permuted(np.arange(len(documents)), len(documents), KEY).tolist()
    rows = []
    for begin in range(0, len(order), window):
        items = []
        for document in order[begin : begin + window]:
            n = max(0, int(documents.offsets[document + 1] - documents.offsets[document]) - 1)
            if n <= S or too_long == "split":
                items += [(document, at, min(S, n - at)) for at in range(0, n, S)]
            elif too_long == "keep_start":
                items.append((document, 0, S))
            elif too_long == "keep_end":
                items.append((document, n - S, S))
        rows += [[items[i] for i in row] for row in plain_bins([size for _, _, size in items], S)]
    return rows


@pytest.mark.parametrize("room", [1, 7, 64, 40_000])
def test_many_windows_at_once_give_the_plain_bins(room: int) -> None:
    rng = np.random.default_rng(room)
    for windows, items in ((1, 1), (3, 40), (17, 90)):
        lengths = rng.integers(0, room + 1, (windows, items)) // rng.integers(1, 6, (windows, items))
        lengths[0, items // 2 :] = 0
        places, bins = first_fit_decreasing(lengths, room)
        for w in range(windows):
            real = [int(i) for i in np.flatnonzero(lengths[w])]
            expected = [[real[i] for i in row] for row in plain_bins(lengths[w, real].tolist(), room)]
            found: list[list[int]] = [[] for _ in expected]
            for place, number in zip(places[w, : len(real)].tolist(), bins[w, : len(real)].tolist(), strict=True):
                found[number].append(place)
            assert found == expected


@pytest.mark.parametrize("too_long", POLICIES)
@pytest.mark.parametrize("S", [1, 5, 16, 64])
def test_rows_are_those_of_the_plain_algorithm(S: int, too_long: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows, several chunks of windows, and every field of every position."""
    monkeypatch.setattr(packing, "FEWEST", 20)
    monkeypatch.setattr(packing, "ROWS_PER_WINDOW", 3)
    monkeypatch.setattr(whole_documents, "TOGETHER", 50)
    rng = np.random.default_rng(S)
    lengths = [1, 1, 2, *rng.integers(1, 3 * min(S, 30) + 2, 200).tolist(), S + 1, 2 * S + 1, 1]
    documents = numbered(lengths, rng.random(sum(lengths)) < 0.7)
    rows = WholeDocuments(documents, S, too_long=too_long)  # type: ignore[arg-type]
    expected = plain_rows(documents, S, too_long, rows.window)
    assert rows.window < 60
    assert len(rows) == len(expected)
    order = rng.permutation(len(rows))
    taken = rows.take(order)
    assert documents.learned is not None
    for at, row in enumerate(order.tolist()):
        wanted: dict[str, list[float]] = {name: [] for name in FIELDS}
        for segment, (document, first, size) in enumerate(expected[row], 1):
            begin = int(documents.offsets[document]) + first
            wanted["tokens"] += (documents.ids[begin : begin + size]).tolist()
            wanted["targets"] += (documents.ids[begin + 1 : begin + size + 1]).tolist()
            wanted["weights"] += documents.learned[begin + 1 : begin + size + 1].tolist()
            wanted["segments"] += [segment] * size
            wanted["positions"] += range(size)
        for name in FIELDS:
            assert taken[name][at].tolist() == wanted[name] + [0] * (S - len(wanted[name])), (name, row)
        whole = [
            (d, first // S) if lengths[d] - 1 > S and too_long == "split" else (d,) for d, first, _ in expected[row]
        ]
        assert rows.examples(row) == whole


@pytest.mark.parametrize("too_long", POLICIES)
def test_every_target_is_met_exactly_once_and_the_report_counts_right(too_long: str) -> None:
    S, rng = 32, np.random.default_rng(3)
    lengths = rng.geometric(0.05, 3000).tolist()
    documents = numbered(lengths, rng.random(sum(lengths)) < 0.5)
    rows = WholeDocuments(documents, S, too_long=too_long)  # type: ignore[arg-type]
    taken = rows.take(np.arange(len(rows)))
    expected: Counter[int] = Counter()
    for d, n in enumerate(lengths):
        targets = list(range(int(documents.offsets[d]) + 2, int(documents.offsets[d]) + n + 1))
        if len(targets) > S:
            targets = {"split": targets, "keep_start": targets[:S], "keep_end": targets[-S:], "drop": []}[too_long]
        expected.update(targets)
    real = taken["segments"] > 0
    assert Counter(taken["targets"][real].tolist()) == expected
    assert {name: taken[name].dtype for name in FIELDS} == {
        name: np.float32 if name == "weights" else np.int32 for name in FIELDS
    }
    report, over = rows.report, [n for n in lengths if n - 1 > S]
    assert (report.documents, report.tokens, report.rows) == (3000, sum(lengths), len(rows))
    assert report.positions == real.sum()
    assert report.padding_share == pytest.approx(1 - real.mean())
    assert report.learned == taken["weights"].sum()
    assert (report.too_long, report.became, report.longest) == (len(over), too_long, max(lengths) - 1)
    assert report.nothing_to_learn == lengths.count(1)
    assert report.dropped == (len(over) if too_long == "drop" else 0)
    lost = {"split": 0, "drop": sum(over)}.get(too_long, sum(n - 1 - S for n in over))
    assert report.truncated_tokens == lost


def test_stop_says_how_many_and_what_would_hold_them() -> None:
    with raises_error("E-DATA-020", "2", "4") as error:
        WholeDocuments(numbered([9, 10, 31, 5]), 8, too_long="stop")
    assert "document takes 30" in error.value.why
    assert "sequence=30" in error.value.fix
    assert len(WholeDocuments(numbered([9, 10, 31, 5]), 30, too_long="stop")) == 2


def test_nothing_to_learn_is_the_users_error() -> None:
    for lengths in ([], [0, 0], [1]):
        with raises_error("E-DATA-021"):
            WholeDocuments(numbered(lengths), 8)
    with raises_error("E-DATA-022"):
        WholeDocuments(numbered([1, 1]), 8)
    with raises_error("E-DATA-022") as error:
        WholeDocuments(numbered([10, 20]), 8, too_long="drop")
    assert "2 of them" in error.value.why


def test_empty_documents_are_left_out() -> None:
    rows = WholeDocuments(numbered([0, 3, 0, 2, 0], np.array([True] * 5)), 4)
    assert rows.report.nothing_to_learn == 3
    assert rows.report.learned == 3
    assert sorted(rows.examples(0)) == [(1,), (3,)]


def test_neighbours_in_the_file_do_not_share_rows() -> None:
    rows = WholeDocuments(numbered([20] * 20_000), 200)
    near = pairs = 0
    for row in range(0, len(rows), 10):
        held = sorted(document for document, *_ in rows.examples(row))
        near += int((np.diff(held) == 1).sum())
        pairs += len(held) - 1
    assert near < 0.01 * pairs


def test_a_window_has_rows_enough_and_not_too_many_documents() -> None:
    assert window_size(10, 210, 2048) == 10
    many = 10**5, 21 * 10**5  # documents, tokens
    assert window_size(*many, 2048) == 12_500  # 128 rows of 102 documents would be 13,107; 8 even windows
    assert window_size(*many, 10**6) == 50_000  # 65,536 at the most
    assert 900 <= window_size(*many, 8) <= 1100


def test_padding_is_small_on_mixed_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 30_000).astype(int) + 2
    rows = WholeDocuments(numbered(lengths.tolist()), 1024)
    assert rows.report.padding_share < 0.01


def test_a_plan_on_disk_gives_the_same_rows_and_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(1, 90, 4000)
    documents = numbered(lengths.tolist())
    memory = WholeDocuments(documents, 32)
    disk = WholeDocuments(documents, 32, plan_folder=tmp_path / "plans")
    assert disk.digest == memory.digest
    assert disk.report == memory.report
    everything = np.arange(len(memory))
    for name, array in memory.take(everything).items():
        np.testing.assert_array_equal(disk.take(everything)[name], array)
    sent = pickle.dumps(disk._plan)
    assert len(sent) < 2000, "another process is told its name"
    items = np.arange(len(memory._plan.items))
    np.testing.assert_array_equal(whole_documents.numbers_at(pickle.loads(sent).items, items), memory._plan.items)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(memory)).take([3])["tokens"], memory.take([3])["tokens"])
    [home] = (tmp_path / "plans").iterdir()
    items, windows = int((-(-(lengths - 1) // 32)).sum()), -(-4000 // memory.window)
    size = sum(file.stat().st_size for file in home.glob("*.bin"))
    assert size == 2 * items + 4 * len(memory) + 24 * (windows + 1)

    def never(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(whole_documents, "pack", never)
    assert len(WholeDocuments(documents, 32, plan_folder=tmp_path / "plans")) == len(memory)
    with pytest.raises(AssertionError, match="planned again"):
        WholeDocuments(documents, 33, plan_folder=tmp_path / "plans")
    with pytest.raises(AssertionError, match="planned again"):
        WholeDocuments(documents, 32, too_long="drop", plan_folder=tmp_path / "plans")
    assert list((tmp_path / "plans").iterdir()) == [home], "what was not finished is not left behind"


@pytest.mark.parametrize("harm", ["short", "table", "json"])
def test_a_damaged_plan_is_named(tmp_path: Path, harm: str) -> None:
    documents = numbered([5, 9, 30, 2])
    WholeDocuments(documents, 8, plan_folder=tmp_path)
    [home] = tmp_path.iterdir()
    if harm == "short":
        (home / "items.bin").write_bytes((home / "items.bin").read_bytes()[:-2])
    elif harm == "table":
        table = bytearray((home / "windows.bin").read_bytes())
        table[8] ^= 1
        (home / "windows.bin").write_bytes(table)
    else:
        said = json.loads((home / "plan.json").read_text())
        del said["counts"]
        (home / "plan.json").write_text(json.dumps(said))
    with raises_error("E-DATA-019") as error:
        WholeDocuments(documents, 8, plan_folder=tmp_path)
    assert "rm -r" in error.value.fix


def test_other_data_and_other_settings_have_another_digest() -> None:
    documents = in_memory([[1, 2, 3], [4, 5]])
    digests = {
        WholeDocuments(documents, 4).digest,
        WholeDocuments(documents, 5).digest,
        WholeDocuments(documents, 4, too_long="drop").digest,
        WholeDocuments(in_memory([[1, 2, 3], [4, 6]]), 4).digest,
    }
    assert len(digests) == 4


def test_a_row_that_is_not_there_is_not_made_up() -> None:
    rows = WholeDocuments(numbered([9, 9]), 8)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            rows.take([0, index])
