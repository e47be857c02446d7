"""The actions of the leader, and a decision: the actions with the view of the leader after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.supervise.leader.leader_view import FinishedJob, LeaderView
from forerun.supervise.protocol.messages import AskStacks, AskUnits, Ending, EndWorker, StopAfter


@dataclass(frozen=True)
class StartWorkers:
    """Store the number of the attempt, then start its worker on each of these hosts, in this order.

    `slices` is the number of slices that the hosts form, or None if the run does not count slices.
    """

    attempt: int
    hosts: tuple[int, ...]
    slices: int | None = None


@dataclass(frozen=True)
class Send:
    """Send a message to these hosts; None: to every host that is connected."""

    message: AskUnits | StopAfter | AskStacks | EndWorker
    hosts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class KeepStacks:
    """Write the stacks of one host to the folder of the supervisor."""

    attempt: int
    host: int
    text: str


@dataclass(frozen=True)
class CloseTunnels:
    """Close the tunnels to the coordinator of the attempt."""


@dataclass(frozen=True)
class WriteLog:
    """Append a record to the supervisor's log."""

    kind: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Say:
    """Print a message for the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the job on every host."""

    ending: Ending


Action = StartWorkers | Send | KeepStacks | CloseTunnels | WriteLog | Say | Finish


@dataclass(frozen=True)
class Decision:
    """The new view, and the actions to execute."""

    view: LeaderView
    actions: tuple[Action, ...] = ()

    def then(self, *actions: Action, **changes: Any) -> Decision:
        """Return this decision with further actions and changes of the view."""
        return Decision(replace(self.view, **changes), (*self.actions, *actions))

    def finished(self, ending: Ending) -> Decision:
        """Return this decision with the end of the job. Supervisors end workers that still run when they receive it."""
        return self.then(CloseTunnels(), Finish(ending), phase=FinishedJob(ending))
