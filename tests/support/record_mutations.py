"""Random damage to the files of a run's record."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from forerun.cloud.record.entries import (
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    LeaseEntry,
    Option,
    ReadyEntry,
    StopEntry,
)

OPTION = Option("tpu", "v6e-8", "us-east1-d", "spot", 1, 10.0, 0.5, 2.0, "abc", 0.1)
# One valid entry of each kind.
ENTRIES: tuple[Any, ...] = (
    CloudRun("bad", "gs://b/bad", "name: bad\n", (OPTION,), 40.0, 1.0, "tpu", ("seed=1",), {"jax": "0.10"}, 10),
    AttemptEntry(1, OPTION, "forerun-bad-1", 1.0, 1800, 0.0),
    ReadyEntry(10.0),
    EndEntry(20.0, "preempted", 1.25, "detail", "capacity"),
    HostEntry(1, 0, 20.0, "training", 3, "detail", 0, "abc", 2.0),
    StopEntry(30.0, "user"),
    FinishEntry(40.0, 1, {"export/model": (3, "0" * 64)}),
    LeaseEntry("laptop", 90.0),
)

_NUMBERS = (0, -1, 1e308, -1e12, 10**30, 2**63, float("nan"), float("inf"), float("-inf"), 0.1)
_STRINGS = ("", "x", "1", "\x1b[2J", "\ud800", "zz\n", "\u202e", "x" * 5000)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from((None, True, False, *_NUMBERS, *_STRINGS, [], {}, [None], [[]], {"a": [1]})),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
)


@st.composite
def mutated_contents(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content of a file with flipped bytes, another length, or other values, types and keys."""
    kind = draw(st.sampled_from(("bytes", "length", "value", "value", "value", "nested", "garbage")))
    if kind == "bytes":
        damaged = bytearray(content)
        for _ in range(draw(st.integers(1, 8))):
            damaged[draw(st.integers(0, len(damaged) - 1))] = draw(st.integers(0, 255))
        return bytes(damaged)
    if kind == "length":
        return content[: draw(st.integers(0, len(content)))] + draw(st.binary(max_size=8))
    if kind == "nested":
        return b'{"at": ' + draw(st.sampled_from((b"[", b'{"a":'))) * draw(st.integers(1, 20_000))
    if kind == "garbage":
        return draw(st.binary(max_size=64))
    values = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        _damage(draw, values)
    return json.dumps(values).encode()


def _damage(draw: st.DrawFn, values: dict[str, Any]) -> None:
    """Change, remove or add a key, also inside the objects of an entry."""
    objects = [values]
    for value in values.values():
        items = value if isinstance(value, list) else [value]
        objects += [item for item in items if isinstance(item, dict) and item]
    chosen = draw(st.sampled_from([value for value in objects if value] or [{"": 0}]))
    key = draw(st.sampled_from(sorted(chosen)))
    action = draw(st.sampled_from(("change", "change", "remove", "add")))
    if action == "remove":
        del chosen[key]
    else:
        chosen[key if action == "change" else f"{key} too"] = draw(VALUES)
