"""Rows, plans and plan files must stay bit-identical across versions: runs resume from them, and stores hold them.

The expected digests were computed with version 1 of the packing. A change of a digest is a change of the data order of
every stored run, so it needs a new version, not a new constant.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.data.documents import InMemory
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.pairs import Pairs
from forerun.data.order.whole_documents import WholeDocuments
from forerun.errors import UserError

# name: (documents, smallest length, largest length, exponent: the larger, the more short documents)
DISTRIBUTIONS: dict[str, tuple[int, int, int, float]] = {
    "one": (1, 900, 900, 1.0),
    "empty and tiny": (300, 0, 4, 1.0),
    "uniform": (300, 1, 130, 1.0),
    "heavy tail": (250, 2, 1500, 4.0),
    "equal to a row": (60, 65, 65, 1.0),
    "multiples of a row": (40, 129, 129, 1.0),
    "several windows": (2600, 1, 30, 1.5),
}
SEQUENCES = (64, 37, 40_000)


def generated(name: str, *, pairs: bool = False) -> InMemory:
    """Return documents (or the two sides of pairs, which share a prompt) with a mask on a part of their tokens."""
    count, low, high, exponent = DISTRIBUTIONS[name]
    source = random.Random(f"{name} {pairs}")

    def size() -> int:
        return low + int((high - low + 1) * source.random() ** exponent)

    documents: list[list[int]] = []
    masks: list[list[bool]] = []
    for _ in range(count // 2 if pairs else count):
        prompt = [int(source.random() * 999) for _ in range(size() // 2)] if pairs else []
        for _ in range(2 if pairs else 1):
            answer = [1000 + int(source.random() * 999) for _ in range(size())]
            documents.append(prompt + answer)
            masks.append([False] * len(prompt) + [source.random() < 0.8 for _ in answer])
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    ids = np.array([token for document in documents for token in document], np.int32)
    return InMemory(ids, offsets, np.array([one for mask in masks for one in mask], np.bool_))


def digest_of_rows(rows: Any) -> str:
    """Return a digest of all that rows give: contents, examples, counts and their own digest."""
    report = rows.report.to_json()
    if isinstance(rows, Concatenated):
        report["too_long"] = rows.count_too_long()
    total = hashlib.sha256(f"{rows.digest} {len(rows)} {json.dumps(report, sort_keys=True)}".encode())
    for begin in range(0, len(rows), 50):
        index = np.arange(begin, min(begin + 50, len(rows)))
        for name, array in rows.take(index).items():
            total.update(f"{name} {array.dtype} {array.shape}".encode())
            total.update(array.tobytes())
        total.update(str([rows.examples(int(row)) for row in index[::7]]).encode())
        if isinstance(rows, Pairs):
            total.update(rows.numbers(index).tobytes())
    return total.hexdigest()[:16]


def digest_of_files(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        total.update(f"{file.relative_to(folder)} ".encode())
        total.update(file.read_bytes() if file.is_file() else b"")
    return total.hexdigest()[:16]


def digest_or_error(packer: Any, documents: InMemory, sequence: int, **options: str) -> str:
    try:
        return digest_of_rows(packer(documents, sequence, **options))
    except UserError as error:
        return hashlib.sha256(json.dumps([error.code, error.exit_code]).encode()).hexdigest()[:16]


def found_digests(name: str, folder: Path) -> dict[str, str]:
    """Return the digest of the rows of each packing, policy and sequence; of refused ones the error's parts."""
    documents, sides = generated(name), generated(name, pairs=True)
    found = {}
    for sequence in SEQUENCES:
        for policy in ("split", "keep_start", "keep_end", "drop", "stop"):
            found[f"whole {policy} {sequence}"] = digest_or_error(WholeDocuments, documents, sequence, too_long=policy)
        for policy in ("keep_end", "drop", "stop"):
            found[f"pairs {policy} {sequence}"] = digest_or_error(Pairs, sides, sequence, too_long=policy)
        found[f"concatenated {sequence}"] = digest_or_error(Concatenated, documents, sequence)
        for policy in ("split", "keep_end"):
            plans = folder / f"{policy} {sequence}"
            rows = WholeDocuments(documents, sequence, too_long=policy, plan_folder=plans)  # type: ignore[arg-type]
            assert digest_of_rows(rows) == found[f"whole {policy} {sequence}"]
            found[f"files {policy} {sequence}"] = digest_of_files(plans)
    return found


EXPECTED: dict[str, str] = {
    "one": "5841d7addbf3af76",
    "empty and tiny": "3d1011ee6f1611ef",
    "uniform": "aabfe3677f15f2d2",
    "heavy tail": "ddc627807bf7adba",
    "equal to a row": "6bd0693a51982123",
    "multiples of a row": "068016216ada98a5",
    "several windows": "0101c52d8d8725a5",
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_and_plan_files_are_those_of_the_first_version(name: str, tmp_path: Path) -> None:
    found = found_digests(name, tmp_path)
    assert len(found) == 33
    assert hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16] == EXPECTED[name], found
