"""Every token exactly once per epoch, whatever the number of hosts and however often it changes: by counting.

A run is three stretches of steps on any of 1, 2, 4 and 8 hosts: all 64 ordered triples, so every resize too. Each
stretch starts from nothing but the step it resumes at; the one before it had gone one step too far, as a killed run
has. Every token of all documents is another number, so counting numbers is counting tokens. Hosts keep nothing from
step to step, so what a number of hosts builds for a step is built once, by fresh objects, and used in every triple.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from forerun.data.documents import InMemory
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.ledger import Ledger, entries
from forerun.data.order.mixture import Mixture
from forerun.data.order.rows import FIELDS, Example, PackedRows
from forerun.data.order.whole_documents import WholeDocuments

S, BATCH, MICRO, STEPS, SEED = 16, 16, 2, 12, 11
HOSTS = (1, 2, 4, 8)
KINDS = ("whole", "concatenated", "mixture", "weighted")


def documents(count: int, seed: int) -> InMemory:
    """Tokens from `seed` millions on; some documents fill several rows."""
    lengths = np.random.default_rng(seed).integers(2, 50, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return InMemory(seed * 10**6 + np.arange(offsets[-1], dtype=np.int32), offsets)


@cache
def parts_of(kind: str) -> tuple[PackedRows, ...]:
    if kind == "whole":
        return (WholeDocuments(documents(55, 1), S),)
    if kind == "concatenated":
        return (Concatenated(documents(55, 1), S),)
    return WholeDocuments(documents(32, 1), S), Concatenated(documents(12, 2), S), WholeDocuments(documents(7, 3), S)


def rows_of(kind: str) -> Mixture:
    return Mixture(parts_of(kind), [2, 1, 1] if kind == "weighted" else None)


@cache
def global_batch(kind: str, step: int, hosts: int) -> dict[str, np.ndarray]:
    """What `hosts` fresh processes build together [rows, S]."""
    given = {"seed": SEED, "batch": BATCH, "accumulation": MICRO}
    shares = np.split(np.arange(BATCH // MICRO), hosts)
    parts = [Batches(rows_of(kind), **given, held=held).batch_at(step) for held in shares]  # type: ignore[arg-type]
    return {name: np.concatenate([getattr(part, name) for part in parts], 1).reshape(BATCH, S) for name in FIELDS}


@cache
def examples(kind: str, step: int) -> list[Example]:
    return Batches(rows_of(kind), seed=SEED, batch=BATCH, accumulation=MICRO).examples_at(step)


@cache
def reference(kind: str) -> tuple[dict[str, np.ndarray], ...]:
    """One host that never stops."""
    batches = Batches(rows_of(kind), seed=SEED, batch=BATCH, accumulation=MICRO)
    taken = [batches.batch_at(step) for step in range(STEPS)]
    return tuple({name: np.asarray(getattr(one, name)).reshape(BATCH, S) for name in FIELDS} for one in taken)


def learned(steps: tuple[dict[str, np.ndarray], ...] | list[dict[str, np.ndarray]]) -> list[list[int]]:
    """Targets that count, row by row."""
    return [
        targets[weights > 0].tolist()
        for step in steps
        for targets, weights in zip(step["targets"], step["weights"], strict=True)
    ]


def all_targets(part: PackedRows) -> Counter[int]:
    """Every token but each document's first, from the documents themselves."""
    held: InMemory = part._documents  # type: ignore[attr-defined]
    return Counter(held.ids.tolist()) - Counter(held.ids[held.offsets[:-1]].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_every_triple_of_host_counts_gives_each_token_once(kind: str, tmp_path: Path) -> None:
    straight = tmp_path / "straight.jsonl"
    with Ledger(straight) as ledger:
        for step in range(STEPS):
            ledger.write(step, examples(kind, step))
    counted = 0
    for number, hosts in enumerate(product(HOSTS, repeat=3)):
        borders = [0, 1 + number % 5, 6 + number % 6, STEPS]
        file, run = tmp_path / f"{number}.jsonl", []
        for count, start, stop in zip(hosts, borders[:-1], borders[1:], strict=True):
            with Ledger(file, start) as ledger:
                for step in range(start, min(stop + 1, STEPS)):
                    ledger.write(step, examples(kind, step))
            run += [global_batch(kind, step, count) for step in range(start, stop)]
        for step, (have, want) in enumerate(zip(run, reference(kind), strict=True)):
            for name in FIELDS:
                np.testing.assert_array_equal(have[name], want[name], err_msg=f"{hosts}, step {step}, {name}")
        assert list(entries(file)) == list(entries(straight)), hosts
        duplicates, skips = counts(kind, run)
        assert (duplicates, skips) == (0, 0), hosts
        counted += 1
    assert counted == 64


def counts(kind: str, run: list[dict[str, np.ndarray]]) -> tuple[int, int]:
    """Tokens met twice, and tokens not met, summed over every whole pass of the run."""
    mixture, rows = rows_of(kind), learned(run)
    if kind == "weighted":
        of_part = [[row for row in rows if row and row[0] // 10**6 == p] for p in (1, 2, 3)]
        groups = [(uses, len(part), all_targets(part)) for uses, part in zip(of_part, mixture.parts, strict=True)]
    else:
        expected: Counter[int] = sum((all_targets(part) for part in mixture.parts), Counter())
        groups = [(rows, len(mixture), expected)]
    duplicates = skips = 0
    for uses, size, wanted in groups:
        assert len(uses) >= size, "at least one whole pass"
        for begin in range(0, len(uses) - size + 1, size):
            met = Counter(token for row in uses[begin : begin + size] for token in row)
            duplicates += (met - wanted).total()
            skips += (wanted - met).total()
    return duplicates, skips


@pytest.mark.parametrize("kind", KINDS)
def test_any_step_first_equals_all_steps_in_turn(kind: str) -> None:
    for step in (11, 0, 7):
        for name, array in global_batch(kind, step, 4).items():
            np.testing.assert_array_equal(array, reference(kind)[step][name])


@pytest.mark.parametrize("kind", ["whole", "mixture"])
def test_the_ledger_names_each_example_once_per_epoch(kind: str) -> None:
    """Documents and pieces, not rows: an epoch of one row a batch."""
    mixture = rows_of(kind)
    batches = Batches(mixture, seed=2, batch=1)
    named = Counter(example for step in range(len(mixture)) for example in batches.examples_at(step))
    assert set(named.values()) == {1}
    for p, part in enumerate(mixture.parts):
        held: InMemory = part._documents  # type: ignore[attr-defined]
        assert {example[1] for example in named if example[0] == p} == set(range(len(held)))
        if isinstance(part, WholeDocuments):
            for document, tokens in enumerate(np.diff(held.offsets).tolist()):
                pieces = sorted(example[2:] for example in named if example[:2] == (p, document))
                expected = [()] if tokens - 1 <= S else [(i,) for i in range(-(-(tokens - 1) // S))]
                assert pieces == expected
