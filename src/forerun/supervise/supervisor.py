"""`supervise`: one host's supervisor from start to end. It never imports jax, so it cannot be stuck where jax is."""

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

from forerun import __version__, interrupt
from forerun.supervise import notice
from forerun.supervise.agent import Agent
from forerun.supervise.chip import free_chip
from forerun.supervise.ending import Ending
from forerun.supervise.hosts import Hosts, bound_address
from forerun.supervise.leader import Leader
from forerun.supervise.limits import Limits
from forerun.supervise.owner import Owner
from forerun.supervise.secret import Secret, new_secret, read_secret
from forerun.supervise.tunnel import private_folder
from forerun.supervise.voice import Voice

METADATA_VARIABLE = "FORERUN_METADATA_URL"


def supervise(
    command: Sequence[str],
    hosts: Hosts,
    run_folder: Path,
    *,
    secret_file: Path | None = None,
    identity: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    spare: bool = False,
) -> int:
    """Runs `command` as this host's worker until the job is over on all hosts; its exit code.

    With `spare`, a second process of it waits beside the worker, its imports done, to be the next one: `command` must
    come to `worker.connect` before it touches or says anything.

    `identity` must be equal on all hosts (the job's digest, for one); versions are added to it. Host 0 owns the run
    folder. Raises UserError for what the user can mend, on every host alike.
    """
    limits = limits or Limits()
    if hosts.count == 1:  # Ctrl-Z stops both ends of the line, which is no loss
        limits = replace(limits, lost=math.inf)
    secret = new_secret() if hosts.count == 1 else read_secret(secret_file)
    known = {**versions(), **(identity or {})}
    voice = Voice("forerun" if hosts.count == 1 else f"forerun host {hosts.index}")
    owner = Owner(run_folder, voice.say) if hosts.leads else None
    try:
        with private_folder() as folder:
            ending = asyncio.run(_supervised(command, hosts, owner, secret, known, Path(folder), limits, voice, spare))
        if ending.text and ending.host != hosts.index:
            voice.say(ending.text)
        return ending.exit_code()
    finally:
        interrupt.reinstall()  # asyncio had its own handlers, and removes them
        if owner is not None:
            owner.release()
        voice.close()


def versions() -> dict[str, str]:
    """What must be installed alike on all hosts."""
    found = {"forerun": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


async def _supervised(
    command: Sequence[str],
    hosts: Hosts,
    owner: Owner | None,
    secret: Secret,
    identity: Mapping[str, str],
    folder: Path,
    limits: Limits,
    voice: Voice,
    spare: bool,
) -> Ending:
    leading: asyncio.Task[Ending] | None = None
    if owner is not None:
        bound = bound_address(hosts.leader)
        leader = Leader(hosts, secret, identity, owner, folder, limits, voice)
        hosts = replace(hosts, port=await leader.door.open(bound, hosts.port))
        leading = asyncio.create_task(leader.run())
    agent = Agent(command, hosts, secret, identity, folder, limits, voice, partial(free_chip, voice.say), spare)
    _listen_to_signals(agent, hosts, limits)
    loop = asyncio.get_running_loop()
    url = os.environ.get(METADATA_VARIABLE, notice.URL)
    notice.watch(url, lambda why, seconds: _tell(loop, agent, why, seconds))
    following = asyncio.create_task(agent.run())
    if leading is None:
        return await following
    ending = await leading
    await following
    return ending


def _tell(loop: asyncio.AbstractEventLoop, agent: Agent, why: str, seconds: float) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(agent.announce, why, seconds)


def _listen_to_signals(agent: Agent, hosts: Hosts, limits: Limits) -> None:
    loop = asyncio.get_running_loop()
    pressed: list[int] = []

    def interrupted() -> None:
        pressed.append(1)
        if len(pressed) == 1:
            agent.announce("Ctrl-C (again: at once)", limits.grace)
        else:
            agent.announce("Ctrl-C twice", 0.0)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    for number in (signal.SIGTERM, signal.SIGHUP):
        why = f"{number.name} to the supervisor of host {hosts.index}"
        loop.add_signal_handler(number, agent.announce, why, limits.grace)
