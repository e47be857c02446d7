"""Entries of a record from damaged and forged files: types, bounds, and content that is no JSON."""

import json
import math
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_mutations import ENTRIES, mutated_contents

from forerun.cloud.record.entries import (
    LEASE_SECONDS,
    AttemptEntry,
    CloudRun,
    EndEntry,
    HostEntry,
    LeaseEntry,
    Option,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import MOST_BYTES, DamagedEntry, read_entry, require_undamaged, write_entry
from forerun.errors import UserError

OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 21.6, 0.5, 2.0, "abc")
RUN = CloudRun("tiny", "gs://b/tiny", "name: tiny\n", (OPTION,), 40.0, 1000.0)
ATTEMPT = AttemptEntry(1, OPTION, "forerun-tiny-1", 1000.0, 3600, 0.0)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_entries_are_read_as_they_were_written(entry: Any) -> None:
    assert read_entry(type(entry), "file", write_entry(entry)) == entry


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        (ReadyEntry(1.0), {"at": "x"}),
        (ReadyEntry(1.0), {"at": "1"}),
        (ReadyEntry(1.0), {"at": True}),
        (ReadyEntry(1.0), {"at": None}),
        (ReadyEntry(1.0), {"at": math.nan}),
        (ReadyEntry(1.0), {"at": math.inf}),
        (ReadyEntry(1.0), {"at": -1.0}),
        (ReadyEntry(1.0), {"at": 4.2e9}),
        (ReadyEntry(1.0), {"at": 10**400}),
        (EndEntry(1.0, "finished", 1.0), {"usd": -1e12}),
        (EndEntry(1.0, "finished", 1.0), {"usd": 1e12}),
        (EndEntry(1.0, "finished", 1.0), {"reason": "\x1b[2J"}),
        (RUN, {"max_usd": 1e12}),
        (RUN, {"max_usd": math.nan}),
        (RUN, {"max_usd": -1.0}),
        (RUN, {"keeper_spent_usd": -1.0}),
        (RUN, {"name": None}),
        (RUN, {"name": ""}),
        (RUN, {"name": "x" * 501}),
        (RUN, {"options": []}),
        (RUN, {"options": [1]}),
        (RUN, {"options": [{**asdict(OPTION), "hosts": 0}]}),
        (RUN, {"options": [{**asdict(OPTION), "capacity": "free"}]}),
        (RUN, {"total_steps": 1.5}),
        (RUN, {"versions": []}),
        (ATTEMPT, {"number": 0}),
        (ATTEMPT, {"number": 10_000}),
        (ATTEMPT, {"number": "1"}),
        (ATTEMPT, {"limit_seconds": -1}),
        (ATTEMPT, {"limit_seconds": 10**9}),
        (ATTEMPT, {"option": {**asdict(OPTION), "usd_per_hour": -10.0}}),
        (HostEntry(1, 0, 1.0, "training"), {"phase": ["training"]}),
        (HostEntry(1, 0, 1.0, "training"), {"host": 4096}),
        (HostEntry(1, 0, 1.0, "training"), {"step": "x"}),
        (LeaseEntry("laptop", 1.0), {"until": 1e300}),
    ],
)
def test_wrong_types_and_bounds_are_damage(entry: Any, changes: dict[str, Any]) -> None:
    found = read_entry(type(entry), "a/file", json.dumps({**asdict(entry), **changes}).encode())
    assert isinstance(found, DamagedEntry)
    assert found.path == "a/file"
    assert next(iter(changes)) in found.reason
    assert "\x1b" not in found.reason
    assert len(found.reason) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0x",
        b"null",
        b"[]",
        b'"at"',
        b"{}",
        b'{"at": 1',
        b'{"at": 1e999}',
        b"\xff\xfe",
        b'{"at": "\\ud800"}',
        b"[" * 100_000,
        b'{"at":' * 100_000,
        b'{"at": ' + b"9" * 10_000 + b"}",
        b" " * (MOST_BYTES + 1),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_content_without_an_entry_is_damage(content: bytes) -> None:
    assert isinstance(read_entry(ReadyEntry, "file", content), DamagedEntry)


def test_another_version_is_refused_by_its_number() -> None:
    found = read_entry(CloudRun, "file", b'{"version": 2, "shape": "unknown"}')
    assert isinstance(found, DamagedEntry)
    assert "version '2'" in found.reason


def test_a_long_detail_is_cut() -> None:
    found = read_entry(StopEntry, "file", write_entry(StopEntry(1.0, "x" * 100_000)))
    assert isinstance(found, StopEntry)
    assert len(found.reason) == 4000


def test_a_lease_that_ends_too_late_is_not_held() -> None:
    assert LeaseEntry("laptop", 1000.0 + LEASE_SECONDS).is_held(1000.0)
    assert not LeaseEntry("laptop", 1000.0).is_held(1000.0)
    assert not LeaseEntry("laptop", 1000.0 + 3600).is_held(1000.0)


def test_a_command_that_needs_a_damaged_entry_has_an_error_with_a_code() -> None:
    with pytest.raises(UserError) as caught:
        require_undamaged(read_entry(ReadyEntry, "a/file", b"{}"))
    assert caught.value.code == "E-CLOUD-092"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_no_mutation_raises_or_passes_a_bound(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from(ENTRIES))
    content = data.draw(mutated_contents(write_entry(entry)))
    found = read_entry(type(entry), "file", content)
    if isinstance(found, DamagedEntry):
        return
    for name in (field.name for field in fields(found)):
        value = getattr(found, name)
        if isinstance(value, float):
            assert 0 <= value <= 4_102_444_800
        if isinstance(value, str):
            assert len(value) <= 1_000_000
