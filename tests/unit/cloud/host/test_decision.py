"""What an agent decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.cloud.host.decision import BUDGET, CONTROLLER_SECONDS, HostAction, HostView, decide
from forerun.cloud.host.training import ServiceState, TrainProgress, parse_state

RUNS, NOT_STARTED = ServiceState(is_active=True), ServiceState()
VIEW = HostView(now=1000.0, host=0, hosts=2, service=RUNS)


def ended(code: int) -> ServiceState:
    return ServiceState(exit_code=code)


@pytest.mark.parametrize(
    ("changes", "phase", "action"),
    [
        ({"service": NOT_STARTED, "setup": "installing"}, "installing", None),
        ({}, "starting", None),
        ({"progress": TrainProgress(step=3)}, "training", None),
        ({"host": 1}, "training", None),
        ({"stop_reason": "user"}, "stopping", HostAction.STOP_TRAINING),
        ({"notice": "preempted"}, "preempting", None),
        # A stop request during the setup: nothing has to be saved.
        ({"service": NOT_STARTED, "stop_reason": "user", "phases": {1: "stopped"}}, "stopped", HostAction.DELETE_SLICE),
        ({"service": ended(75), "stop_reason": "user"}, "stopped", None),
        ({"service": ended(75), "stop_reason": "user", "ended_seconds": 30.0}, "stopped", HostAction.DELETE_SLICE),
        ({"service": ended(75), "stop_reason": "user", "phases": {1: "stopped"}}, "stopped", HostAction.DELETE_SLICE),
        ({"service": ended(75), "stop_reason": "user", "host": 1, "ended_seconds": 30.0}, "stopped", None),
        (
            {"service": ended(75), "stop_reason": "user", "host": 1, "ended_seconds": 121.0},
            "stopped",
            HostAction.DELETE_SLICE,
        ),
        ({"service": ended(0)}, "exporting", HostAction.EXPORT),
        ({"service": ended(0), "host": 1}, "exporting", None),
        ({"service": ended(0), "is_exported": True}, "exporting", None),
        ({"service": ended(0), "is_finished": True, "phases": {1: "finished"}}, "finished", HostAction.DELETE_SLICE),
        # A run that ends in the moment of a stop request is finished.
        ({"service": ended(0), "stop_reason": "user"}, "exporting", HostAction.EXPORT),
        ({"service": ended(75)}, "preempting", None),
        ({"service": ended(-9), "notice": "preempted"}, "preempting", None),
        ({"service": ended(2)}, "failed", None),
        ({"service": ended(2), "ended_seconds": CONTROLLER_SECONDS}, "failed", HostAction.DELETE_SLICE),
        ({"service": ended(75), "ended_seconds": CONTROLLER_SECONDS}, "preempting", HostAction.DELETE_SLICE),
        ({"service": NOT_STARTED, "setup": "broken 3 of 4 chips"}, "broken", None),
        ({"service": NOT_STARTED, "setup": "failed line 12"}, "broken", None),
        ({"service": NOT_STARTED, "setup": "waiting"}, "installing", None),
        ({"service": None, "setup": "started"}, "starting", None),
    ],
)
def test_phases_and_actions(changes: dict[str, object], phase: str, action: HostAction | None) -> None:
    decision = decide(replace(VIEW, **changes))  # type: ignore[arg-type]
    assert (decision.phase, decision.action) == (phase, action)


def test_deadline_stops_training_a_grace_time_before() -> None:
    """The grace time is 60 s and 1.5 times the save of 20 s; host 1 acts 15 s later."""
    view = replace(VIEW, deadline_at=1000.0 + 90, progress=TrainProgress(step=5, save_seconds=20.0))
    assert decide(replace(view, now=999.9)).action is None
    decision = decide(view)
    assert (decision.action, decision.detail) == (HostAction.STOP_TRAINING, BUDGET)
    assert decide(replace(view, host=1, now=1014.9)).action is None
    assert decide(replace(view, host=1, now=1015.0)).action is HostAction.STOP_TRAINING


@pytest.mark.parametrize("host", [0, 1, 63])
def test_every_host_deletes_the_slice_before_the_deadline(host: int) -> None:
    view = replace(VIEW, host=host, hosts=64, deadline_at=1090.0, now=1089.0)
    for service in (RUNS, NOT_STARTED, ended(0), ended(75), ended(2), None):
        assert decide(replace(view, service=service)).action is HostAction.DELETE_SLICE


def test_workers_that_host_0_stopped_at_the_deadline_are_not_preempted() -> None:
    view = replace(VIEW, host=3, hosts=4, deadline_at=1060.0, service=ended(75))
    assert decide(view).phase == "stopped"
    assert decide(view).detail == BUDGET


def test_machines_of_the_user_are_never_deleted() -> None:
    view = replace(VIEW, is_rented=False, deadline_at=500.0, ended_seconds=1e6)
    for service in (NOT_STARTED, ended(0), ended(75), ended(2), None):
        assert decide(replace(view, service=service)).action is not HostAction.DELETE_SLICE


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("ActiveState=active\nExecMainCode=0\nExecMainStatus=0\n", RUNS),
        ("ActiveState=deactivating\nExecMainCode=0\nExecMainStatus=0\n", RUNS),
        ("ActiveState=inactive\nExecMainCode=0\nExecMainStatus=0\n", NOT_STARTED),
        ("ActiveState=inactive\nExecMainCode=1\nExecMainStatus=0\n", ended(0)),
        ("ActiveState=failed\nExecMainCode=1\nExecMainStatus=75\n", ended(75)),
        ("ActiveState=failed\nExecMainCode=2\nExecMainStatus=9\n", ended(-9)),
        ("", None),
    ],
)
def test_states_of_systemd(text: str, state: ServiceState | None) -> None:
    assert parse_state(text) == state


def test_results_are_not_stored_in_the_last_grace_before_the_deadline() -> None:
    view = replace(VIEW, deadline_at=1050.0, service=ended(0))
    decision = decide(view)
    assert (decision.phase, decision.detail, decision.action) == ("stopped", BUDGET, None)
    assert decide(replace(view, is_finished=True)).phase == "finished"
