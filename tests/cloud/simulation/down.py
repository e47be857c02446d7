"""`forerun down --all` with the simulated cloud."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

from forerun.cli.cloud import end_runs as down_command
from forerun.cloud.record import run_files as run_files_module
from forerun.cloud.view import project_state, removal, run_location
from forerun.errors import UserError
from simulation.bucket import FOLDER, BucketFolder
from simulation.process import Faults, Process

if TYPE_CHECKING:
    from simulation.simulation import Simulation


def serial_calls(function: Any, values: Sequence[Any], seconds: float) -> dict[Any, Any]:
    """Call a function for each value, in place of `bounded_calls` with its threads."""
    return {value: function(value) for value in values}


class CommandTime:
    """The module `time` of the command."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def time(self) -> float:
        return self.simulation.world.now

    def monotonic(self) -> float:
        return self.simulation.world.now

    def sleep(self, seconds: float) -> None:
        self.simulation.world.run_until(self.simulation.world.now + seconds)


def take_everything_down(simulation: Simulation, *, is_last: bool) -> None:
    """Run `forerun down --all` and require that it deletes what the API lists.

    While the API fails, it may end with an error. The damage of the record must never matter.
    """
    world, cloud, scenario = simulation.world, simulation.cloud, simulation.scenario
    world.note("user: forerun down --all")
    outages = [outage for outage in scenario.controller_faults.outages if outage.target == "bucket"]
    process = Process(world, Faults(outages=outages), "laptop", "down")
    providers = tuple(simulation.providers(process).values())
    existing = [machine for machine in cloud.machines if machine.is_listed]
    output = io.StringIO()
    with ExitStack() as stack:
        for target, name, value in (
            (down_command, "providers_of", lambda args: providers),
            (down_command, "time", CommandTime(simulation)),
            (project_state, "bounded_calls", serial_calls),
            (removal, "bounded_calls", serial_calls),
            (run_location, "known_runs", lambda: (FOLDER,)),
            (run_files_module, "folder_at", lambda folder: _folder(folder, simulation, process)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        problem = ""
        try:
            down_command.down(None, all=True, yes=True)
        except UserError as error:
            problem = f"{error.what}: {error.why}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    remaining = [machine.request.name for machine in existing if machine.is_listed]
    if is_last:
        remaining = [machine.request.name for machine in cloud.machines if machine.is_listed]
    if remaining:
        simulation.checks.fail(f"forerun down does not delete {', '.join(remaining)}: {problem[:300]}")
    elif problem:
        world.note(f"forerun down: {problem}")


def _folder(folder: object, simulation: Simulation, process: Process) -> object:
    return folder if not isinstance(folder, str) else BucketFolder(simulation.bucket, process)
