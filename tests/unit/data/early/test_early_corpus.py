"""The identity of the data of a job that starts early."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.config.schema import Data
from forerun.data.early.arrival import UnitArrival
from forerun.data.early.early_corpus import _ArrivingPart, _digest
from forerun.storage.folder import LocalFolder


def digest(
    store: str = "abc",
    packing: str = "concatenate",
    weights: tuple[float, ...] = (0.25, 0.75),
    sequence: int = 64,
    too_long: Any = "auto",
) -> str:
    folder = LocalFolder(f"/stores/{store}")  # type: ignore[arg-type]
    arriving = _ArrivingPart(UnitArrival("data", folder, [], []), 256, packing, None)
    return _digest([arriving], weights, Data(path="rows.jsonl", too_long=too_long), sequence)


@pytest.mark.parametrize(
    "changes",
    [
        {"store": "abd"},
        {"packing": "whole"},
        {"weights": (0.75, 0.25)},
        {"sequence": 128},
        {"too_long": "drop"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_everything_that_changes_the_rows_changes_the_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_the_default_policy_has_the_digest_of_its_name() -> None:
    assert digest(too_long="auto") == digest(too_long="split")
