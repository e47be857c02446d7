"""Tests of the JSON form of all messages, which is that of the protocol before it had classes for its messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from forerun.supervise.protocol import messages as m
from forerun.supervise.protocol.ending import Ending
from forerun.supervise.protocol.json_form import (
    InvalidMessage,
    decode_first,
    decode_from_host,
    decode_from_leader,
    decode_from_supervisor,
    decode_from_worker,
    encode,
)
from forerun.supervise.protocol.worker_state import WorkerView

VIEW = """{"phase":"step","step":7,"units":8,"silent_seconds":0.25,"limit_seconds":Infinity,"state":"S",
"cpu_seconds":1.5,"save_seconds":null,"step_seconds":0.5,"alive":true,"halted":false,
"memory":"RAM","memory_bytes":4096,"memory_limit_bytes":null}"""
Decode = Callable[[dict[str, Any]], m.Message]
FORMS: list[tuple[Decode, m.Message, str]] = [
    (
        decode_first,
        m.Hello(1, 2, "a1", "vm", 77, {"jax": "0.10.2"}),
        '{"kind":"hello","index":1,"count":2,"instance":"a1","name":"vm","pid":77,"identity":{"jax":"0.10.2"}}',
    ),
    (decode_first, m.OpenTunnel(3), '{"kind":"tunnel","attempt":3}'),
    (decode_from_host, m.HostBeat(), '{"kind":"beat"}'),
    (
        decode_from_host,
        m.HostBeat(
            3,
            WorkerView("step", 7, 8, 0.25, state="S", cpu_seconds=1.5, step_seconds=0.5, memory_bytes=4096),
            {"data": "12"},
        ),
        f'{{"kind":"beat","attempt":3,"view":{VIEW},"facts":{{"data":"12"}}}}',
    ),
    (decode_from_host, m.StopNotice("SIGTERM", 30.0), '{"kind":"asked","why":"SIGTERM","seconds":30.0}'),
    (
        decode_from_host,
        m.StartFailure("E-HOSTS-004", "what", "why", "fix", 3),
        '{"kind":"mistake","code":"E-HOSTS-004","what":"what","why":"why","fix":"fix","attempt":3}',
    ),
    (
        decode_from_host,
        m.Exited(-9, False, "last words", 7, 3),
        '{"kind":"exited","code":-9,"ended":false,"tail":"last words","step":7,"attempt":3}',
    ),
    (decode_from_host, m.Idle(3), '{"kind":"idle","attempt":3}'),
    (decode_from_host, m.HostUnits(8, 3), '{"kind":"begun","units":8,"attempt":3}'),
    (
        decode_from_host,
        m.HostStacks("text", ("f (x.py:1)",), 0.5, 3),
        '{"kind":"stacks","text":"text","frames":["f (x.py:1)"],"busy":0.5,"attempt":3}',
    ),
    (decode_from_leader, m.LeaderBeat(), '{"kind":"beat"}'),
    (decode_from_leader, m.StartWorker(3, 1, 2), '{"kind":"start","attempt":3,"index":1,"hosts":2}'),
    (decode_from_leader, m.StartWorker(3, 1, 4, 2), '{"kind":"start","attempt":3,"index":1,"hosts":4,"slices":2}'),
    (decode_from_leader, m.EndWorker(3), '{"kind":"end","attempt":3}'),
    (decode_from_leader, m.AskStacks(), '{"kind":"stacks"}'),
    (decode_from_leader, m.AskUnits(29.5), '{"kind":"ask","seconds":29.5,"ends_job":true}'),
    (
        decode_from_leader,
        m.StopAfter(8, True, 29.5),
        '{"kind":"decide","units":8,"save":true,"seconds":29.5,"ends_job":true}',
    ),
    (
        decode_from_leader,
        Ending(2, "", "E-HOSTS-031", "what", "why", "fix", -1),
        '{"kind":"over","code":2,"text":"","error":"E-HOSTS-031","what":"what","why":"why","fix":"fix","host":-1}',
    ),
    (decode_from_supervisor, m.Welcome(), '{"kind":"welcome"}'),
    (
        decode_from_supervisor,
        m.Begin(3, 1, 2, "unix:/tmp/x"),
        '{"kind":"begin","attempt":3,"index":1,"hosts":2,"coordinator":"unix:/tmp/x","variables":{}}',
    ),
    (decode_from_supervisor, m.AskUnits(29.5), '{"kind":"ask","seconds":29.5,"ends_job":true}'),
    (
        decode_from_supervisor,
        m.StopAfter(8, False, 0.0, False),
        '{"kind":"decide","units":8,"save":false,"seconds":0.0,"ends_job":false}',
    ),
    (decode_from_worker, m.WorkerHello(140, 77), '{"kind":"hello","thread":140,"pid":77}'),
    (decode_from_worker, m.Phase("compile", 0), '{"kind":"phase","name":"compile","units":0}'),
    (decode_from_worker, m.Step(7, 8), '{"kind":"step","step":7,"units":8}'),
    (decode_from_worker, m.Saved(2.5, 8), '{"kind":"saved","seconds":2.5,"units":8}'),
    (decode_from_worker, m.DeviceBytes(512, 1024), '{"kind":"memory","bytes":512,"limit":1024}'),
    (decode_from_worker, m.Waiting("data", 8), '{"kind":"waiting","what":"data","units":8}'),
    (decode_from_worker, m.Unit(9), '{"kind":"unit","units":9}'),
    (decode_from_worker, m.Fact("data digest", "12"), '{"kind":"fact","name":"data digest","value":"12"}'),
    (decode_from_worker, m.WorkerUnits(9), '{"kind":"begun","units":9}'),
    (decode_from_worker, m.Sigterm(), '{"kind":"sigterm"}'),
]
NAMES = [f"{decode.__name__} {type(message).__name__}" for decode, message, _ in FORMS]
# Values that no field has: infinite numbers, and those of another type.
WRONG: list[Any] = [float("nan"), float("-inf"), 10**400, 1.5, "x", None, [], [1], {}, {"a": 1}, True]


@pytest.mark.parametrize(("decode", "message", "form"), FORMS, ids=NAMES)
def test_the_json_form_has_not_changed(decode: Decode, message: m.Message, form: str) -> None:
    written = json.loads(json.dumps(encode(message)))
    assert written == json.loads(form)
    assert list(written) == list(json.loads(form))
    assert decode(written) == message


def test_every_message_is_tested() -> None:
    unions = (m.FromHost, m.FromLeader, m.FromSupervisor, m.FromWorker)
    known = {m.Hello, m.OpenTunnel, *(each for union in unions for each in get_args(union))}
    assert {type(message) for _, message, _ in FORMS} == known


def damaged(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the message without each field, with an unknown field, and with values of another type."""
    yield {**form, "unknown": 1}
    for name, value in form.items():
        optional = form["kind"] == "beat" or name in ("kind", "slices")
        if not optional:
            yield {key: other for key, other in form.items() if key != name}
        for wrong in WRONG:
            accepted = type(value) is type(wrong) or (type(value) is float and type(wrong) in (int, float))
            empty = wrong in ([], {}) and isinstance(value, type(wrong))
            if not (accepted or empty or (optional and wrong is None and name != "kind")):
                yield {**form, name: wrong}


@pytest.mark.parametrize(("decode", "message", "form"), FORMS, ids=NAMES)
def test_any_other_form_is_refused(decode: Decode, message: m.Message, form: str) -> None:
    for wrong in damaged(json.loads(form)):
        with pytest.raises(InvalidMessage):
            decode(wrong)


@pytest.mark.parametrize("value", [float("nan"), 10**400])
def test_seconds_are_numbers_that_a_clock_can_have(value: float) -> None:
    with pytest.raises(InvalidMessage):
        decode_from_host({"kind": "asked", "why": "", "seconds": value})
    assert decode_from_host({"kind": "asked", "why": "", "seconds": 30}) == m.StopNotice("", 30.0)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_host_outside_of_the_count_is_refused(index: int, count: int) -> None:
    hello = {"kind": "hello", "instance": "", "name": "", "pid": 1, "identity": {}}
    with pytest.raises(InvalidMessage):
        decode_first({**hello, "index": index, "count": count})


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(InvalidMessage):
        decode_from_host({"kind": "start", "attempt": 1})
    with pytest.raises(InvalidMessage):
        decode_from_leader({"kind": "idle", "attempt": 1})
