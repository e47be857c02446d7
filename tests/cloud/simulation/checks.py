"""The invariants of a simulation, with their own computation of the bill and of the longest life of a machine.

Nothing here uses `forerun.cloud.control`: prices, caps, times and outages are those of the simulation itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.events import World
from simulation.guest import WATCH_SECONDS
from simulation.machines import Machine
from simulation.process import Outage
from simulation.scenario import Scenario
from simulation.training import CHECKPOINTS, Training

FREE_SECONDS = 60.0  # of a spot machine that is preempted in its first minute
RETRY_SECONDS = 60.0  # the longest pause of a controller after a failed call
MARGIN_SECONDS = 5.0
LIMIT_MARGIN_SECONDS = 300.0  # how much later than the agent the watch of the startup script deletes a slice


@dataclass
class Checks:
    """Collects violations while a simulation runs."""

    world: World
    scenario: Scenario
    machines: list[Machine]
    recorded_cap: Callable[[], float | None]  # the cap in run.json of the bucket, or None without a valid file
    trainings: list[Training] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    caps: list[tuple[float, float]] = field(default_factory=list)
    controller_gaps: list[tuple[float, float]] = field(default_factory=list)
    host_gaps: list[tuple[float, float]] = field(default_factory=list)
    checkpoints: dict[str, bytes] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)
            self.world.note(f"VIOLATION: {text}")

    def bill(self, *, until: float | None = None) -> float:
        """Return what all machines have cost."""
        return sum(self._usd(machine, until) for machine in self.machines)

    def _usd(self, machine: Machine, until: float | None = None) -> float:
        if machine.ready_at is None:
            return 0.0
        end = self.world.now if machine.gone_at is None else machine.gone_at
        if until is not None:
            end = min(end, until)
        seconds = max(0.0, end - machine.ready_at)
        if machine.is_preempted and seconds <= FREE_SECONDS:
            return 0.0
        return machine.usd_per_hour * seconds / 3600

    @property
    def cap_usd(self) -> float:
        """The cap of the user's last command."""
        return self.caps[-1][1] if self.caps else self.scenario.cap_usd

    def _cap_of(self, machine: Machine) -> float:
        """Return the cap that holds for a machine.

        Only a controller can keep a cap that the user lowers after the machine was requested. A keeper learns a lower
        cap from the record. If that was deleted or damaged meanwhile, the cap that the user agreed to before holds.
        """
        caps = [cap for time, cap in self.caps if time <= machine.requested_at]
        if "controller" not in self.scenario.guards:
            return max([*caps[-1:], self.cap_usd])
        has_keeper = any(other.is_keeper and other.ready_at is not None for other in self.machines)
        return max([*caps, self.cap_usd]) if has_keeper and self.recorded_cap() != self.cap_usd else self.cap_usd

    def ready(self, machine: Machine) -> None:
        """Schedule the check of a machine's life."""
        assert machine.ready_at is not None
        rate = machine.usd_per_hour + sum(
            keeper.usd_per_hour for keeper in self.machines if keeper.is_keeper and keeper.runs
        )
        if machine.is_keeper:
            rate = machine.usd_per_hour
        unknown_usd = sum(self._unknown_usd(earlier) for earlier in self.machines if earlier is not machine)
        left_usd = self._cap_of(machine) - self.bill() + unknown_usd
        deadline = machine.ready_at + max(left_usd, 0.0) / rate * 3600
        self.world.at(self.latest_end(machine, deadline), lambda: self._check_life(machine, deadline))

    def latest_end(self, machine: Machine, deadline: float) -> float:
        """Return the latest time at which the first of the existing limits must have acted."""
        if machine.is_keeper:
            pause = max(self.scenario.poll_seconds, RETRY_SECONDS)  # its bucket may not answer
            return self._extended(deadline, "controller") + pause + MARGIN_SECONDS
        return min(self._latest_of(guard, machine, deadline) for guard in self.scenario.guards)

    def _latest_of(self, guard: str, machine: Machine, deadline: float) -> float:
        scenario = self.scenario
        if guard != "controller":
            # The hosts and the API keep the cap of the request. Only a controller can keep one that was lowered later.
            caps = [cap for time, cap in self.caps if time <= machine.requested_at]
            lowered_usd = max([*caps[-1:], self.cap_usd]) - self.cap_usd
            deadline += lowered_usd / machine.usd_per_hour * 3600
        if guard == "api":
            return deadline + MARGIN_SECONDS
        unseen = self._unseen_seconds(machine)
        if guard == "controller":
            return self._extended(deadline, guard) + scenario.poll_seconds + unseen + MARGIN_SECONDS
        slack = scenario.guest.poll_seconds
        if any(offset < 0 for _, _, offset in scenario.clock_glitches):
            # An agent that starts while the API's clock is wrong counts the limit from its start.
            slack += scenario.guest.boot_seconds + scenario.guest.install_seconds + scenario.poll_seconds
        if guard == "watch":
            slack = WATCH_SECONDS + LIMIT_MARGIN_SECONDS
        elif machine.delivered_at is None:
            slack = WATCH_SECONDS  # before the agent starts, the watch of the startup script deletes at the limit
        return self._extended(deadline, guard, slack) + slack + unseen + MARGIN_SECONDS

    def _extended(self, time: float, guard: str, slack: float = 0.0) -> float:
        """Return the end of the period around `time`, or at most `slack` later, in which a limit cannot act."""
        roles = ("all", "laptop", "keeper") if guard == "controller" else ("all", "host")
        outages: list[Outage] = self.scenario.controller_faults.outages
        blocked = [outage for outage in outages if outage.target == "api" and outage.users in roles]
        gaps = [(outage.start, outage.end + RETRY_SECONDS) for outage in blocked]
        if guard == "controller":
            # A time ahead can only end a run early. One that is set back deceives only a controller that starts.
            glitches = [(start, end) for start, end, offset in self.scenario.clock_glitches if offset < 0]
            gaps += [(start, end + RETRY_SECONDS) for start, end in glitches]
        if guard == "controller":
            # A suspended process continues with the pause or the call that it was in.
            gaps += [(start, end + RETRY_SECONDS) for start, end in self.controller_gaps]
        else:
            gaps += self.host_gaps
        margin = max(self.scenario.poll_seconds, slack) + MARGIN_SECONDS
        for start, end in sorted(gaps):
            if start <= time + margin and end > time:
                time = end
        return time

    def _unseen_seconds(self, machine: Machine) -> float:
        """Return how long nothing could know that a machine runs, because the API tells no times."""
        if machine.ready_at is None or self._tells_times:
            return 0.0
        return (self.world.now if machine.seen_at is None else machine.seen_at) - machine.ready_at

    def _unknown_usd(self, machine: Machine) -> float:
        """Return how much of the cost of a machine that has ended nothing could know.

        The API does not tell when a machine was preempted. If it refused all calls before, the last report of the hosts
        plus 30 s counts, and hosts may hang.
        """
        if machine.gone_at is None or machine.ready_at is None:
            return 0.0
        if machine.is_preempted:
            last_seen_at = machine.ready_at if machine.last_seen_at is None else machine.last_seen_at
            unseen = machine.gone_at - last_seen_at
            if unseen > self.scenario.poll_seconds + MARGIN_SECONDS:
                return machine.usd_per_hour * unseen / 3600
        if self._tells_times:
            return 0.0
        unseen = min(self._unseen_seconds(machine), machine.gone_at - machine.ready_at)
        seen_seconds = machine.gone_at - machine.ready_at - unseen
        if machine.is_preempted and seen_seconds <= FREE_SECONDS:
            unseen += seen_seconds
        return machine.usd_per_hour * unseen / 3600

    @property
    def _tells_times(self) -> bool:
        return self.scenario.tells_times or self.scenario.provider == "http"

    def _check_life(self, machine: Machine, deadline: float) -> None:
        if not machine.runs:
            return
        latest = self.latest_end(machine, deadline)
        if self.world.now < latest:  # a process was suspended or killed in the meantime
            self.world.at(latest, lambda: self._check_life(machine, deadline))
            return
        late = self.world.now - deadline
        guards = "+".join(self.scenario.guards)
        self.fail(f"{machine.request.name} runs {late:.0f} s after its budget is used up; limits: {guards}")

    def gone(self, machine: Machine, training: Training | None) -> None:
        """Check how a machine ends."""
        if training is not None and training.is_active and self.scenario.is_calm and not machine.is_preempted:
            stop_at = training.stop_asked_at
            self.fail(f"attempt {machine.attempt} is deleted before its checkpoint; stop asked at {stop_at}")

    def write(self, training: Training, step: int, phase: str, content: bytes | None) -> None:
        """Check a write of a checkpoint: no other attempt may write or train."""
        for active in self.trainings:
            if active is not training and active.is_active:
                self.fail(f"attempts {active.attempt} and {training.attempt} write at the same time")
        if phase == "end" and content is not None:
            self.checkpoints[f"{CHECKPOINTS}{step:06}"] = content

    def end(self, contents: dict[str, bytes]) -> None:
        """Check the checkpoints and the bill at the end."""
        for name, content in self.checkpoints.items():
            if contents.get(name) != content:
                self.fail(f"{name} is lost")

    def figures(self) -> dict[str, float]:
        """Return the counts of the simulation."""
        rented = [machine for machine in self.machines if machine.ready_at is not None]
        hours = sum(((machine.gone_at or self.world.now) - (machine.ready_at or 0.0)) / 3600 for machine in rented)
        return {"machines": len(rented), "machine_hours": hours, "checkpoints": len(self.checkpoints)}
