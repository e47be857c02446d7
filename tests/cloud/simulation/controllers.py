"""The processes that control a run: the user's command and the keeper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from forerun.cloud import labels
from forerun.cloud.control.actions import Action, EndRun
from forerun.cloud.control.begin import begin_run, with_cap
from forerun.cloud.control.controller import Controller
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.control.run_report import event_text
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.keeper import keeper_process
from forerun.cloud.keeper.keeper_process import KeeperSettings
from forerun.cloud.keeper.keeper_start import keeper_request
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.record.entries import CloudRun, LeaseEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import UserError
from simulation.bucket import BucketFolder
from simulation.events import TraceReporter
from simulation.guest import Delivery
from simulation.machines import Machine
from simulation.process import Killed, Process, Suspended

if TYPE_CHECKING:
    from simulation.simulation import Simulation

KEEPER, KEEPER_USD_PER_HOUR = "forerun-sim-keeper", 0.6
USER_RETRY_SECONDS = 60.0  # a user starts a command again that ended with an error
KEEPER_START_SECONDS = 60.0


def sleep(seconds: float) -> None:
    raise Suspended(seconds)


class TraceDisplay:
    """Writes the events of a controller to the trace."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._last = note, ""

    def show(self, view: ControlView, action: Action) -> None:
        self._tell(event_text(action) or "")

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        self._tell(f"{lease.holder} controls the run")

    def trouble(self, message: str) -> None:
        self._tell(f"trouble: {message}")

    def _tell(self, text: str) -> None:
        if text and text != self._last:
            self._last = text
            self._note(text)


class PolledController(Controller):
    """A controller that looks less often, which makes simulations faster."""

    poll = 15.0

    def follow(self, sleep: Any, poll_seconds: float = 5.0, until: Any = lambda view: False) -> Any:
        return super().follow(sleep, self.poll, until)


class ControllerProcess:
    """A process that controls the run and that may be killed and started again.

    Attributes:
      end: how the run ended, as this process reports it.
      starts, begins: how often it was started, and how often the start succeeded.
    """

    def __init__(self, simulation: Simulation, role: str) -> None:
        self.simulation, self.role = simulation, role
        self.process = self._process()
        self.ledger = RunLedger()
        self.controller: Controller | None = None
        self.end: EndRun | None = None
        self.is_gone = False  # for ever
        self.starts = self.begins = 0
        self.needs_cap = False

    def start(self) -> None:
        """Start the process."""
        if self.is_gone or self.end is not None:
            return
        self.starts += 1
        self.ledger = RunLedger(self.simulation.disk / f"{self.role}.ledger.json")
        self.controller = None
        self.process = self._process()
        self.resume()

    def resume(self) -> None:
        """Continue the process until it sleeps or ends."""
        world, process = self.simulation.world, self.process
        try:
            self.end = self._continue()
            world.note(f"{self.role}: the command ends: {self.end.reason}")
        except Suspended as suspended:
            world.after(suspended.seconds, lambda: self._wake(process))
        except Killed:
            self.restart_later(world.random.uniform(1, 60))
        except (UserError, CloudUnavailable, OSError) as error:
            self._ended_with(error)
        except Exception as error:
            self.simulation.checks.fail(f"the {self.role} crashed: {type(error).__name__}: {error}")
            self.restart_later(USER_RETRY_SECONDS)

    def kill(self, seconds: float | None) -> None:
        """Kill the process, and start it again later if `seconds` is not None."""
        if self.end is not None or self.process.is_killed:
            return
        self.process.kill()
        if seconds is None:
            self.is_gone = True
        else:
            self.restart_later(seconds)

    def restart_later(self, seconds: float) -> None:
        """Start the process again after some time, in which it cannot act."""
        world, process = self.simulation.world, self.process
        process.is_killed = True
        self.simulation.checks.controller_gaps.append((world.now, world.now + seconds + MARGIN_SECONDS))
        world.after(seconds, lambda: self.start() if self.process is process else None)

    def _wake(self, process: Process) -> None:
        if self.process is process and not process.is_killed:
            if process.is_paused:
                self.simulation.world.after(1.0, lambda: self._wake(process))
            else:
                self.resume()

    def _ended_with(self, error: Exception) -> None:
        """Report an error that ended the process while it controlled machines. The user starts it again."""
        simulation = self.simulation
        text = error.what if isinstance(error, UserError) else str(error)
        simulation.world.note(f"{self.role}: the command ends with an error: {text}")
        now = simulation.world.now
        simulation.checks.controller_gaps.append(
            (now, now + USER_RETRY_SECONDS + MARGIN_SECONDS)
        )  # no controller runs until then
        if self.controller is not None and any(
            machine.runs and not machine.is_keeper for machine in simulation.cloud.machines
        ):
            simulation.checks.fail(f"the {self.role} ended with an error while a machine runs: {text}")
        self.restart_later(USER_RETRY_SECONDS)

    def _continue(self) -> EndRun:
        if self.controller is None:
            self.controller = self._begin()
        if self.controller is None:
            return EndRun("finished")
        _, end = self.controller.follow(sleep)
        assert end is not None
        return end

    def _begin(self) -> Controller | None:
        """Begin or resume the run, as `forerun run` does. Return None if it has finished."""
        simulation = self.simulation
        files, providers = self.files(), self.providers()
        now = next(iter(providers.values())).now()
        if self._has_finished(files):
            return None
        run = self._agreed_run(files, providers, now)
        if run.keeper and simulation.keeper is None:
            simulation.world.after(KEEPER_START_SECONDS, lambda: simulation.start_keeper(run))
        return self.controller_of(run, files, providers, now)

    def _has_finished(self, files: RunFiles) -> bool:
        if undamaged(files.finished()) is None or self.ledger.open:
            return False
        return all(undamaged(files.end(number)) is not None for number in files.attempts())

    def _agreed_run(self, files: RunFiles, providers: dict[str, Any], now: float) -> CloudRun:
        """Ask the question and begin the run. The cap that the question names must be the one that holds."""
        simulation = self.simulation
        cap = simulation.cap_of_begin(self.begins) if not self.needs_cap else simulation.checks.cap_usd
        request = replace(simulation.wanted, max_usd=simulation.scenario.default_cap_usd if cap is None else cap)
        try:
            agreed = with_cap(files, request, self.ledger, max_usd_given=cap is not None)
        except UserError:
            self.needs_cap = True  # the user gives it with the next command
            raise
        assert agreed.max_usd is not None
        run = begin_run(files, agreed, providers, now, ledger=self.ledger)
        # A command that ends with an error before this has changed no cap, and says so.
        simulation.checks.caps.append((simulation.world.now, agreed.max_usd))
        if run.max_usd != agreed.max_usd:
            simulation.checks.fail("the cap of a resumed run is not the one that the question names")
        self.begins += 1
        return run

    def controller_of(self, run: CloudRun, files: RunFiles, providers: dict[str, Any], since: float) -> Controller:
        simulation = self.simulation
        display = TraceDisplay(lambda text: simulation.world.note(f"{self.role}: {text}"))
        holder = f"{self.role}:{self.starts}"
        delivery = Delivery(simulation.context, self.process)
        controller = PolledController(
            run, files, providers, delivery, display, holder, since, self.ledger, lambda: simulation.world.now
        )
        controller.poll = simulation.scenario.poll_seconds
        return controller

    def files(self) -> RunFiles:
        return RunFiles(BucketFolder(self.simulation.bucket, self.process))

    def providers(self) -> dict[str, Any]:
        return self.simulation.providers(self.process)

    def _process(self) -> Process:
        simulation = self.simulation
        faults = simulation.scenario.controller_faults
        return Process(simulation.world, faults, self.role, self.role, simulation.checks.controller_gaps)


MARGIN_SECONDS = 20.0  # of a process that starts


class KeeperProcess(ControllerProcess):
    """The keeper, on its own machine."""

    def __init__(self, simulation: Simulation, machine: Machine, run: CloudRun) -> None:
        super().__init__(simulation, "keeper")
        self.machine, self.run = machine, run
        self.since = simulation.world.now

    def start(self) -> None:
        if self.machine.runs:
            super().start()

    def _wake(self, process: Process) -> None:
        if self.machine.runs:
            super()._wake(process)

    def _continue(self) -> EndRun:
        simulation, request = self.simulation, self.machine.request
        settings = KeeperSettings(self.run, "sim", request.name, request.zone, since=self.since)
        files, providers = self.files(), self.providers()
        if self.controller is None:
            self.controller = self.controller_of(self.run, files, providers, self.since)
        controller = self.controller
        # The loop of the keeper is entered again after each sleep, with the controller that it has.
        with mock.patch.object(keeper_process, "Controller", return_value=controller):
            return keeper_process.run_keeper(
                settings,
                providers,
                Delivery(simulation.context, self.process),
                TraceReporter(simulation.world, "keeper"),
                sleep,
                files,
            )


def rent_keeper(simulation: Simulation, run: CloudRun) -> Machine:
    """Create the machine of the keeper, with the limit that `forerun run` gives it."""
    limit = int(simulation.scenario.cap_usd / KEEPER_USD_PER_HOUR * 3600)
    request = keeper_request(run, "zone-a", "e2-small", {}, limit)
    simulation.cloud.create(request, "compute")
    assert request.labels[labels.ROLE] == labels.KEEPER_ROLE
    return simulation.cloud.machines[-1]
