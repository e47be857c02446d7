"""Tests of the JSON form of all messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from forerun.supervise.protocol import messages as m
from forerun.supervise.protocol.json_form import (
    InvalidMessage,
    decode_first,
    decode_from_host,
    decode_from_leader,
    decode_from_supervisor,
    decode_from_worker,
    encode,
)
from forerun.supervise.protocol.messages import Ending, WorkerView

Decode = Callable[[dict[str, Any]], m.Message]
VIEW = WorkerView("step", 7, 8, 0.25, state="S", cpu_seconds=1.5, step_seconds=0.5, memory_bytes=4096)
MESSAGES: list[tuple[Decode, m.Message]] = [
    (decode_first, m.Hello(1, 2, "a1", "vm", 77, {"jax": "0.10.2"})),
    (decode_first, m.OpenTunnel(3)),
    (decode_from_host, m.HostBeat()),
    (decode_from_host, m.HostBeat(3, VIEW, {"data": "12"})),
    (decode_from_host, m.StopNotice("SIGTERM", 30.0)),
    (decode_from_host, m.StartFailure("E-HOSTS-004", "what", "why", "fix", 3)),
    (decode_from_host, m.Exited(-9, False, "last words", 7, 3)),
    (decode_from_host, m.Idle(3)),
    (decode_from_host, m.HostUnits(8, 3)),
    (decode_from_host, m.HostStacks("text", ("f (x.py:1)",), 0.5, 3)),
    (decode_from_leader, m.LeaderBeat()),
    (decode_from_leader, m.StartWorker(3, 1, 2)),
    (decode_from_leader, m.StartWorker(3, 1, 4, 2)),
    (decode_from_leader, m.EndWorker(3)),
    (decode_from_leader, m.AskStacks()),
    (decode_from_leader, m.AskUnits(29.5)),
    (decode_from_leader, m.StopAfter(8, True, 29.5)),
    (decode_from_leader, Ending(2, "", "E-HOSTS-031", "what", "why", "fix", -1)),
    (decode_from_supervisor, m.Welcome()),
    (decode_from_supervisor, m.Begin(3, 1, 2, "unix:/tmp/x")),
    (decode_from_supervisor, m.AskUnits(29.5)),
    (decode_from_supervisor, m.StopAfter(8, False, 0.0, False)),
    (decode_from_worker, m.WorkerHello(140, 77)),
    (decode_from_worker, m.Phase("compile", 0)),
    (decode_from_worker, m.Step(7, 8)),
    (decode_from_worker, m.Saved(2.5, 8)),
    (decode_from_worker, m.DeviceBytes(512, 1024)),
    (decode_from_worker, m.Waiting("data", 8)),
    (decode_from_worker, m.Unit(9)),
    (decode_from_worker, m.Fact("data digest", "12")),
    (decode_from_worker, m.WorkerUnits(9)),
    (decode_from_worker, m.Sigterm()),
]
NAMES = [f"{decode.__name__} {type(message).__name__}" for decode, message in MESSAGES]
# Values that no field has: infinite numbers, and those of another type.
WRONG: list[Any] = [float("nan"), float("-inf"), 10**400, 1.5, "x", None, [], [1], {}, {"a": 1}, True]


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=NAMES)
def test_a_message_is_the_same_after_encoding_and_decoding(decode: Decode, message: m.Message) -> None:
    form = json.loads(json.dumps(encode(message)))
    assert None not in form.values()
    assert decode(form) == message


def test_every_message_is_tested() -> None:
    unions = (m.FromHost, m.FromLeader, m.FromSupervisor, m.FromWorker)
    known = {m.Hello, m.OpenTunnel, *(each for union in unions for each in get_args(union))}
    assert {type(message) for _, message in MESSAGES} == known


def damaged(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the message without each field, with an unknown field, and with values of another type."""
    yield {**form, "unknown": 1}
    for name, value in form.items():
        optional = form["kind"] in ("HostBeat", "LeaderBeat") or name in ("kind", "slices")
        if not optional:
            yield {key: other for key, other in form.items() if key != name}
        for wrong in WRONG:
            accepted = type(value) is type(wrong) or (type(value) is float and type(wrong) in (int, float))
            empty = wrong in ([], {}) and isinstance(value, type(wrong))
            if not (accepted or empty or (optional and wrong is None and name != "kind")):
                yield {**form, name: wrong}


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=NAMES)
def test_any_other_form_is_refused(decode: Decode, message: m.Message) -> None:
    for wrong in damaged(json.loads(json.dumps(encode(message)))):
        with pytest.raises(InvalidMessage):
            decode(wrong)


@pytest.mark.parametrize("value", [float("nan"), 10**400])
def test_seconds_are_numbers_that_a_clock_can_have(value: float) -> None:
    with pytest.raises(InvalidMessage):
        decode_from_host({"kind": "StopNotice", "why": "", "seconds": value})
    assert decode_from_host({"kind": "StopNotice", "why": "", "seconds": 30}) == m.StopNotice("", 30.0)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_host_outside_of_the_count_is_refused(index: int, count: int) -> None:
    hello = {"kind": "Hello", "instance": "", "name": "", "pid": 1, "identity": {}}
    with pytest.raises(InvalidMessage):
        decode_first({**hello, "index": index, "count": count})


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(InvalidMessage):
        decode_from_host({"kind": "StartWorker", "attempt": 1})
    with pytest.raises(InvalidMessage):
        decode_from_leader({"kind": "Idle", "attempt": 1})
