"""Defects that were fixed. Each can be brought back, to show that the simulation finds it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from forerun.cloud.control import controller, observation
from forerun.cloud.control.begin import begin_run
from forerun.cloud.control.observation import RunObserver
from forerun.cloud.google import rest
from forerun.cloud.host import agent
from forerun.cloud.host.host_clock import HostClock
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.record import run_files
from forerun.cloud.record.entries import AttemptEntry, CloudRun, EndEntry, FinishEntry, LeaseEntry, Option, ReadyEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.errors import StorageError, UserError
from simulation import controllers as simulated_controllers


@dataclass(frozen=True)
class Revert:
    """A defect.

    Attributes:
      item: the item of the work that fixed it: 1 damaged records, 2 the agent's deadline, 3 independent limits,
        4 refused calls, 5 the cap of a resumed run.
      changes: replacements of attributes of forerun, as (holder, name, value).
    """

    item: int
    defect: str
    changes: Callable[[], list[tuple[Any, str, Any]]]


@contextmanager
def reverted(name: str | None) -> Iterator[None]:
    """Bring a defect back for a while; None: change nothing."""
    with ExitStack() as stack:
        for holder, attribute, value in [] if name is None else REVERTS[name].changes():
            stack.enter_context(mock.patch.object(holder, attribute, value))
        yield


def _read_without_types(kind: Any, path: str, content: bytes) -> Any:
    values = json.loads(content)
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in values.items() if name in names}
    if kind is CloudRun:
        values["options"] = tuple(Option(**option) for option in values["options"])
        values["arguments"] = tuple(values.get("arguments", ()))
    if kind is AttemptEntry:
        values["option"] = Option(**values["option"])
    if kind is FinishEntry:
        values["files"] = {name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
    return kind(**values)


def _entries_without_types() -> list[tuple[Any, str, Any]]:
    return [(run_files, "read_entry", _read_without_types)]


def _agent_deadline_from_the_record() -> list[tuple[Any, str, Any]]:
    def deadline(now: Any, elapsed: Any, delivered: Any, ready_times: Any, limits: Any) -> float | None:
        return None if ready_times[1] is None or limits[1] is None else ready_times[1] + limits[1]

    return [(agent, "host_deadline_at", deadline)]


def _agent_believes_every_time() -> list[tuple[Any, str, Any]]:
    def receive(clock: HostClock, answer: Any) -> str:
        clock._known, clock._is_cloud = answer, True
        return ""

    def deadline(now: Any, elapsed: Any, delivered: Any, ready_times: Any, limits: Any) -> float | None:
        return delivered

    return [(HostClock, "_receive", receive), (agent, "host_deadline_at", deadline)]


def _cap_from_the_record() -> list[tuple[Any, str, Any]]:
    return [(observation, "with_lower_cap", lambda run, recorded: recorded)]


def _attempts_from_the_record() -> list[tuple[Any, str, Any]]:
    original = RunObserver._read_attempts

    def read(observer: RunObserver, providers: Any, now: float) -> None:
        original(observer, providers, now)
        for number, attempt in observer.ledger.attempts.items():
            entry = undamaged(observer.files.attempt(number))
            if entry is not None and attempt.end is None:
                observer.ledger.attempts[number] = replace(attempt, entry=entry)

    return [
        (RunObserver, "_read_attempts", read),
        (observation, "adopted", lambda entry, run, spent, now: entry),
        (observation, "is_foreign", lambda entry, run: False),
    ]


def _ready_time_from_the_record() -> list[tuple[Any, str, Any]]:
    original = RunObserver._read_open

    def read(observer: RunObserver, number: int, now: float) -> None:
        original(observer, number, now)
        ready = observer.files.ready(number)
        if isinstance(ready, ReadyEntry):
            observer.ledger.attempts[number] = replace(observer.ledger.attempts[number], ready_at=ready.at)

    return [(RunObserver, "_read_open", read)]


def _ends_from_the_record() -> list[tuple[Any, str, Any]]:
    original = RunObserver._read_open

    def read(observer: RunObserver, number: int, now: float) -> None:
        original(observer, number, now)
        end = observer.files.end(number)
        if isinstance(end, EndEntry):
            observer.ledger.end(number, end)

    return [(RunObserver, "_read_open", read)]


def _forged_lease() -> list[tuple[Any, str, Any]]:
    return [
        (LeaseEntry, "is_held", lambda lease, now: now < lease.until),
        (controller, "is_limit", lambda view, action: False),
    ]


def _user_error_ends_the_controller() -> list[tuple[Any, str, Any]]:
    def ends(self: Any, error: Exception) -> bool:
        return isinstance(error, UserError) and not isinstance(error, StorageError)

    return [(controller.Controller, "_ends_control", ends)]


def _odd_answers_end_the_controller() -> list[tuple[Any, str, Any]]:
    return [(controller, "FAILURES", (CloudUnavailable, UserError, OSError))]


def _answers_without_shapes() -> list[tuple[Any, str, Any]]:
    def accept(content: Any, shape: Any, request: str) -> Any:
        return content if isinstance(content, dict) else {}

    return [(rest, "_shaped", accept)]


def _lists_without_end() -> list[tuple[Any, str, Any]]:
    def pages(self: rest.Rest, api: str, path: str, params: Any = None, shape: Any = None) -> Iterator[Any]:
        token = ""
        while True:
            page = self.call("GET", api, path, params={**(params or {}), "pageToken": token}, shape=shape)
            yield page
            token = str(page.get("nextPageToken") or "")
            if not token:
                return

    return [(rest.Rest, "pages", pages)]


def _no_limit_without_the_bucket() -> list[tuple[Any, str, Any]]:
    return [(controller.Controller, "_enforce_limit", lambda self: None)]


def _resumed_cap() -> list[tuple[Any, str, Any]]:
    def begin(*arguments: Any, **options: Any) -> CloudRun:
        return begin_run(*arguments, **{**options, "max_usd_given": False})

    return [
        (simulated_controllers, "with_cap", lambda files, run, ledger, max_usd_given: run),
        (simulated_controllers, "begin_run", begin),
    ]


REVERTS = {
    "entries-without-types": Revert(1, "entries are read without types and bounds", _entries_without_types),
    "agent-deadline-from-the-record": Revert(
        2, "the agent has no deadline until it has read the bucket", _agent_deadline_from_the_record
    ),
    "agent-believes-every-time": Revert(2, "one wrong time of the API moves the clock", _agent_believes_every_time),
    "cap-from-the-record": Revert(3, "the controller takes the cap from run.json", _cap_from_the_record),
    "attempts-from-the-record": Revert(
        3, "the controller takes price, limit and resource from the record", _attempts_from_the_record
    ),
    "ready-time-from-the-record": Revert(3, "the start of billing is that of the record", _ready_time_from_the_record),
    "ends-from-the-record": Revert(3, "a recorded end is believed without a deletion", _ends_from_the_record),
    "forged-lease": Revert(3, "a controller without the lease keeps no limit", _forged_lease),
    "user-error-ends-the-controller": Revert(
        4, "one refused call ends the controller", _user_error_ends_the_controller
    ),
    "odd-answers-end-the-controller": Revert(
        4, "an answer of the wrong shape ends the controller", _odd_answers_end_the_controller
    ),
    "answers-without-shapes": Revert(4, "an answer of the wrong shape crashes a command", _answers_without_shapes),
    "lists-without-end": Revert(4, "a list whose pages do not end is read for ever", _lists_without_end),
    "no-limit-without-the-bucket": Revert(
        4, "a bucket that does not answer stops the controller's limit", _no_limit_without_the_bucket
    ),
    "resumed-cap": Revert(5, "a resumed run keeps another cap than its question names", _resumed_cap),
}
