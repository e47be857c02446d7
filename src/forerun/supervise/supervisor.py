"""The supervisor of one host, from start to end. It never imports jax, so it cannot hang inside jax."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import os
import platform
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from forerun import interrupt
from forerun.errors import UserError
from forerun.hardware import maintenance_notice
from forerun.supervise.agent import Agent
from forerun.supervise.console import Console
from forerun.supervise.free_tpu import require_free_tpu
from forerun.supervise.host_address import Hosts, bound_address
from forerun.supervise.leader.leader import Leader
from forerun.supervise.owner import Owner
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Ending, StartWorker
from forerun.supervise.protocol.tunnel import private_folder
from forerun.supervise.protocol.wire import new_secret, read_secret
from forerun.supervise.slice_policy import SlicePolicy
from forerun.version import __version__

# What libtpu needs on a host of several slices. Google Cloud sets these variables for queued resources with several
# nodes and in GKE, and `jax/_src/clusters/cloud_tpu_cluster.py` reads the same names.
ADDRESS, COUNT, NUMBER = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
# How long a stop by a signal may take, in seconds. The units of cloud runs allow more time than the default.
STOP_VARIABLE = "FORERUN_STOP_SECONDS"


def supervise(
    command: Sequence[str],
    hosts: Hosts,
    run_folder: Path,
    *,
    secret_file: Path | None = None,
    identity: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    spare: bool = False,
    slices: int | None = None,
    policy: SlicePolicy | None = None,
) -> int:
    """Run `command` as the worker of this host until the job has ended on all hosts.

    Args:
        command: The command of the worker. It must call `worker.connect`.
        hosts: The place of this host in the run.
        run_folder: The folder of the run. Only host 0 locks it and writes to it.
        secret_file: The secret of the run. It is not needed for one host.
        identity: Values that must be equal on all hosts, such as the digest of the job. Versions are added.
        limits: Time limits, by default those of `Limits`, with the grace time of FORERUN_STOP_SECONDS.
        spare: Whether to keep a second process of `command` ready, with its imports done, for the next attempt.
            `command` must then call `worker.connect` before it prints or changes anything.
        slices: The TPU slices of the run, or None if the job does not say. Workers get the variables of their slice.
        policy: With how many slices the run may continue; by default, with all of them.

    Returns:
        The exit code of the job.

    Raises:
        UserError: The user can correct the cause. An error of the job is raised on every host.
    """
    limits = limits or default_limits()
    if hosts.count == 1:  # Ctrl-Z suspends both ends of the connection, so silence does not mean that one is lost
        limits = replace(limits, lost=math.inf)
    secret = new_secret() if hosts.count == 1 else read_secret(secret_file)
    known = {**versions(), **(identity or {})}
    slice_variables(hosts, slices, os.environ)  # raises if the hosts do not match the slices
    environment = dict(os.environ)
    console = Console("forerun" if hosts.count == 1 else f"forerun host {hosts.index}")
    owner = Owner(run_folder, console) if hosts.leads else None

    async def work(folder: Path) -> Ending:
        leading: asyncio.Task[Ending] | None = None
        place = hosts
        if owner is not None:
            bound = bound_address(hosts.leader)
            leader = Leader(hosts, secret, known, owner, folder, limits, console, policy)
            place = replace(hosts, port=await leader.listener.open(bound, hosts.port))
            leading = asyncio.create_task(leader.run())
        agent = Agent(
            command,
            place,
            secret,
            known,
            folder,
            limits,
            console,
            partial(require_free_tpu, console),
            spare,
            lambda order: attempt_variables(hosts, slices, environment, order),
        )
        _listen_to_signals(agent, place, limits)
        loop = asyncio.get_running_loop()
        url = maintenance_notice.metadata_url()
        maintenance_notice.watch(url, lambda why, seconds: _tell(loop, agent, why, seconds))
        following = asyncio.create_task(agent.run())
        if leading is None:
            return await following
        ending = await leading
        await following
        return ending

    try:
        with private_folder() as folder:
            ending = asyncio.run(work(Path(folder)))
        if ending.text and ending.host != hosts.index:
            console.info(ending.text)
        return ending.exit_code()
    finally:
        interrupt.reinstall()  # asyncio replaced the signal handlers
        if owner is not None:
            owner.release()
        console.close()


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, by package."""
    found = {"forerun": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _tell(loop: asyncio.AbstractEventLoop, agent: Agent, why: str, seconds: float) -> None:
    """Announce a stop to the agent from another thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(agent.announce, why, seconds)


def default_limits(environment: Mapping[str, str] = os.environ) -> Limits:
    """Return the limits, with the grace time of FORERUN_STOP_SECONDS."""
    value = environment.get(STOP_VARIABLE)
    if value is None:
        return Limits()
    if not value.isdecimal() or not int(value):
        raise UserError(
            "E-HOSTS-033",
            f"{STOP_VARIABLE}={value} is not a time",
            why="a whole number of seconds is needed, 1 or more",
            fix=f"remove {STOP_VARIABLE} from the environment, or set a whole number such as 300",
        )
    return Limits(grace=float(value))


def _listen_to_signals(agent: Agent, hosts: Hosts, limits: Limits) -> None:
    """Announce a stop at SIGINT, SIGTERM and SIGHUP. A second SIGINT has no grace time."""
    loop = asyncio.get_running_loop()
    pressed: list[int] = []

    def interrupted() -> None:
        pressed.append(1)
        if len(pressed) == 1:
            agent.announce("Ctrl-C (press it again to stop immediately)", limits.grace)
        else:
            agent.announce("Ctrl-C twice", 0.0)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    for number in (signal.SIGTERM, signal.SIGHUP):
        why = f"{number.name} to the supervisor of host {hosts.index}"
        loop.add_signal_handler(number, agent.announce, why, limits.grace)


def slice_variables(hosts: Hosts, slices: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return libtpu's variables of a worker while all slices take part, or an empty dictionary if it needs none.

    The hosts of a slice have consecutive numbers, and host 0 is the coordinator. Variables of the cloud are kept.

    Args:
        hosts: The place of this host in the run.
        slices: The job's `mesh.slices`. None means that the cloud sets the variables if there are several slices.
        environment: The environment of the supervisor.

    Raises:
        UserError: The hosts do not divide into slices, or the environment has another number of slices.
    """
    if slices in (None, 1) or hosts.count == 1:  # one host with several slices has virtual devices
        return {}
    assert slices is not None
    known = environment.get(COUNT)
    if hosts.count % slices or known not in (None, "", str(slices)):
        reason = f"{COUNT}={known}" if known else "all slices have the same number of hosts"
        raise UserError(
            "E-HOSTS-034",
            f"mesh.slices={slices} does not match the {hosts.count} hosts of this run",
            why=reason,
            fix="start the hosts of all slices, one slice after the other, and set mesh.slices to the number of slices",
        )
    if known:
        return {}
    own = hosts.index // (hosts.count // slices)
    return {ADDRESS: hosts.leader, COUNT: str(slices), NUMBER: str(own)}


def attempt_variables(
    hosts: Hosts, slices: int | None, environment: Mapping[str, str], order: StartWorker
) -> dict[str, str]:
    """Return the variables of the worker of one attempt, in which some slices may not take part.

    The remaining slices are numbered anew, so the variables of the cloud are replaced then. The coordinator stays: the
    first slice takes part in every attempt. An empty value means that the variable is removed: one slice needs none.
    """
    if order.hosts == hosts.count or order.slices is None:
        return slice_variables(hosts, slices, environment)
    if order.slices == 1:
        return {ADDRESS: "", COUNT: "", NUMBER: ""}
    own = order.index // (order.hosts // order.slices)
    address = environment.get(ADDRESS) or hosts.leader
    return {ADDRESS: address, COUNT: str(order.slices), NUMBER: str(own)}
