"""Tests of the leader's order of events. The test plays the other supervisors, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.leader import Leader
from forerun.supervise.owner import Owner
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.wire import Line, Secret, join

pytestmark = pytest.mark.timing

OURS = Secret(b"the secret of this run")
LIMITS = Limits(beat=0.01, settle=0.01, handshake=120, lost=120, gather=120, reconnect=120)
ENOUGH = 30  # beats, in which a leader that does not wait would have sent something else


def starts(attempt: int) -> list[dict[str, Any]]:
    """The orders that start an attempt on two hosts."""
    return [{"kind": "StartWorker", "attempt": attempt, "index": index, "hosts": 2} for index in range(2)]


class Host:
    """A host's connection to the leader."""

    def __init__(self, line: Line) -> None:
        self.line = line

    async def order(self) -> dict[str, Any]:
        """Return the leader's next message that is not a beat."""
        while (message := await self.line.receive())["kind"] == "LeaderBeat":
            pass
        return message

    async def orders_during_beats(self) -> list[dict[str, Any]]:
        """Return what the leader sends besides some beats."""
        found, beats = [], 0
        while beats < ENOUGH and not found:
            message = await self.line.receive()
            if message["kind"] == "LeaderBeat":
                beats += 1
            else:
                found.append(message)
        return found


class Rig:
    def __init__(self, port: int) -> None:
        self._port = port
        self.lines: list[Line] = []

    async def host(self, index: int) -> Host:
        line = await join(*await asyncio.open_connection("127.0.0.1", self._port), OURS)
        self.lines.append(line)
        hello = {"kind": "Hello", "index": index, "count": 2, "instance": f"{index}", "name": "vm", "pid": 1}
        line.send({**hello, "identity": {}})
        return Host(line)


@asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[Rig]:
    """A leader of two hosts. Fails if the leader or a connection ends with an exception that nobody handles."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    owner, console = Owner(folder), Console("test")
    leader = Leader(Hosts(0, 2, port=8476), OURS, {}, owner, folder, LIMITS, console)
    rig = Rig(await leader.listener.open("127.0.0.1", 0))
    run = asyncio.create_task(leader.run())
    async with asyncio.timeout(120):
        yield rig
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        for line in rig.lines:
            line.close()
        while leader.listener._lines:
            await asyncio.sleep(0.01)
    assert leader.listener._server is not None
    leader.listener._server.close()
    owner.release()
    console.close()
    assert unhandled == []


def test_nothing_starts_before_all_hosts_have_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with leading(tmp_path) as rig:
            second = await rig.host(1)
            assert await second.orders_during_beats() == []
            first = await rig.host(0)
            assert [await first.order(), await second.order()] == starts(1)

    asyncio.run(scenario())


@pytest.mark.parametrize("late", [0, 1])
def test_the_next_attempt_waits_until_every_worker_of_the_last_one_has_ended(tmp_path: Path, late: int) -> None:
    """Two workers of one host would use the same devices, and write the same checkpoints."""

    async def scenario() -> None:
        async with leading(tmp_path) as rig:
            hosts = [await rig.host(0), await rig.host(1)]
            assert [await host.order() for host in hosts] == starts(1)
            dead, slow = hosts[1 - late], hosts[late]
            dead.line.send({"kind": "Exited", "attempt": 1, "code": 1, "ended": False, "tail": "", "step": 3})
            assert [await host.order() for host in hosts] == [{"kind": "EndWorker", "attempt": 1}] * 2
            dead.line.send({"kind": "Idle", "attempt": 1})
            assert await dead.orders_during_beats() == []
            slow.line.send({"kind": "Idle", "attempt": 1})
            assert [await host.order() for host in hosts] == starts(2)

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [float("inf"), float("nan"), "x", None, []])
def test_a_message_with_a_wrong_value_closes_only_its_own_connection(tmp_path: Path, code: object) -> None:
    async def scenario() -> None:
        async with leading(tmp_path) as rig:
            hosts = [await rig.host(0), await rig.host(1)]
            assert [await host.order() for host in hosts] == starts(1)
            hosts[1].line.send({"kind": "Exited", "attempt": 1, "code": code, "ended": False, "tail": "", "step": 3})
            with pytest.raises(EOFError):
                await hosts[1].order()
            assert await hosts[0].order() == {"kind": "EndWorker", "attempt": 1}

    asyncio.run(scenario())


def test_a_leader_writes_what_its_hosts_report(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    worker = {
        **{
            "phase": "step",
            "units": 8,
            "silent_seconds": 0.0,
            "limit_seconds": 600.0,
            "state": "S",
            "cpu_seconds": 1.5,
        },
        **{"step_seconds": 0.5, "alive": True, "halted": False, "memory": "RAM", "memory_bytes": 4096},
    }

    async def scenario() -> None:
        async with leading(tmp_path) as rig:
            hosts = [await rig.host(0), await rig.host(1)]
            assert [await host.order() for host in hosts] == starts(1)
            for host, step in zip(hosts, (8, 5), strict=True):
                view = {**worker, "step": step}
                host.line.send({"kind": "HostBeat", "attempt": 1, "view": view, "facts": {}})
            async with asyncio.timeout(100):
                while not file.exists() or [one["step"] for one in json.loads(file.read_text())["hosts"]] != [8, 5]:
                    await asyncio.sleep(0.05)
        content = json.loads(file.read_text())
        assert [one["lag"] for one in content["hosts"]] == [0, 3]
        assert [one["memory_bytes"] for one in content["hosts"]] == [4096, 4096]

    asyncio.run(scenario())
