"""A process with its faults: each of its calls to the API or the bucket may be refused, delayed or the last one."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.cloud.provider import CloudUnavailable
from forerun.errors import UserError
from simulation.bucket import storage_error
from simulation.events import World

MOST_CALLS = 20_000  # of all processes at one moment


class Stuck(BaseException):
    """A process makes calls without an end."""


class Killed(BaseException):
    """The process was killed."""


class Suspended(BaseException):
    """The process sleeps. Its loop is entered again when the time is over, with the same objects."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(frozen=True)
class Outage:
    """A period in which calls fail.

    Attributes:
      target: `api` or `bucket`.
      users: the processes that are refused: `all`, or a role (`laptop`, `keeper`, `host`).
      kind: how calls fail: `down`, `denied`, `login`, `odd` (an answer of the wrong shape),
        `pages` (a list without an end).
    """

    target: str
    users: str
    start: float
    end: float
    kind: str


@dataclass
class Faults:
    """The faults of single calls, as probabilities, and the outages of a seed."""

    outages: list[Outage] = field(default_factory=list)
    kill: float = 0.0
    pause: float = 0.0
    lost: float = 0.0  # the answer of a call that was carried out
    odd: float = 0.0  # an answer of the API of the wrong shape
    late: float = 0.0  # writes that take effect after the caller has given up

    def outage(self, target: str, role: str, now: float) -> Outage | None:
        for outage in self.outages:
            if outage.target == target and outage.start <= now < outage.end and outage.users in ("all", role):
                return outage
        return None


class Process:
    """A process of the simulation.

    Attributes:
      role: `laptop`, `keeper`, `host`, `user` (a command of the user), or `cloud`.
      gaps: periods in which the process was suspended. The checks allow for them.
    """

    def __init__(
        self, world: World, faults: Faults, role: str, name: str, gaps: list[tuple[float, float]] | None = None
    ) -> None:
        self.world, self.faults, self.role, self.name = world, faults, role, name
        self.is_killed = False
        self.is_paused = False
        self.gaps = [] if gaps is None else gaps

    def call(self, target: str) -> None:
        """Begin a call. Raise the error with which it fails."""
        outage = self.check(target)
        if outage is not None:
            raise failure(outage)
        if target == "api" and self.faults.odd and self.world.random.random() < self.faults.odd:
            self.world.fault("answers of the wrong shape")
            raise CloudUnavailable("an answer of the wrong shape")

    def check(self, target: str) -> Outage | None:
        """Begin a call. Return the outage that it meets, or None."""
        faults, world = self.faults, self.world
        if self.is_killed:
            raise Killed
        world.calls = world.calls + 1 if world.called_at == world.now else 1
        world.called_at = world.now
        if world.calls > MOST_CALLS:
            raise Stuck
        if faults.kill and world.random.random() < faults.kill:
            self.kill()
            raise Killed
        if faults.pause and not self.is_paused and world.random.random() < faults.pause:
            self._pause(world.random.choice((3.0, 20.0, 90.0)))
        outage = faults.outage(target, self.role, world.now) if faults.outages else None
        if outage is not None:
            world.fault(f"failed calls of the {target}")
        return outage

    def answer(self, target: str) -> None:
        """End a call that was carried out. Its answer may be lost, or its process may have ended with its machine."""
        if self.is_killed:
            raise Killed
        if self.faults.lost and self.world.random.random() < self.faults.lost:
            self.world.fault("lost answers", f"{self.name}: an answer of the {target} is lost")
            raise storage_error("lost") if target == "bucket" else CloudUnavailable("lost")

    def late_seconds(self) -> float | None:
        """Return the delay of a write that takes effect late, or None."""
        if self.faults.late and self.world.random.random() < self.faults.late:
            self.world.fault("late writes")
            return self.world.random.choice((10.0, 60.0, 400.0))
        return None

    def kill(self) -> None:
        self.world.fault("kills of processes", f"{self.name} is killed")
        self.is_killed = True

    def _pause(self, seconds: float) -> None:
        """Let the time pass in the middle of a call, as on a machine that sleeps."""
        world, began = self.world, self.world.now
        world.fault("suspended processes", f"{self.name} is suspended for {seconds:.0f} s")
        self.gaps.append((began, began + seconds))
        self.is_paused = True
        world.run_until(began + seconds)
        self.is_paused = False
        if self.is_killed:
            raise Killed


def failure(outage: Outage) -> Exception:
    """Return the exception with which forerun's clients report a failed call."""
    if outage.target == "bucket":
        if outage.kind == "denied":
            return UserError("E-DATA-170", "the bucket denies access", why="403", fix="grant access")
        return storage_error("503")
    if outage.kind == "denied":
        return UserError("E-CLOUD-016", "the account may not do this", why="403", fix="forerun doctor --cloud")
    if outage.kind == "login":
        return UserError("E-CLOUD-014", "the credentials are not accepted", why="401", fix="sign in again")
    return CloudUnavailable("HTTP status 503")
