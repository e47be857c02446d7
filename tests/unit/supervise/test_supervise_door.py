"""The leader's door, over real lines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from forerun.supervise.door import Door
from forerun.supervise.ending import Ending
from forerun.supervise.hosts import Hosts
from forerun.supervise.limits import Limits
from forerun.supervise.secret import Secret
from forerun.supervise.voice import Voice
from forerun.supervise.wire import join

OURS = Secret(b"the secret of this run")
IDENTITY = {"jax": "0.10.2", "job": "1"}


async def knock(door: Door, port: int, index: int, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """What the door says to this host; None if it is let in, and told nothing for a moment."""
    line = await join(*await asyncio.open_connection("127.0.0.1", port), OURS)
    about = {"kind": "hello", "index": index, "count": 2, "instance": f"{index}", "name": "vm", "pid": 1}
    line.send({**about, "identity": dict(identity)})
    answer = asyncio.create_task(line.receive())
    async with asyncio.timeout(120):
        while not answer.done() and index not in door.members:
            await asyncio.sleep(0.01)
    await asyncio.wait([answer], timeout=0.2)
    try:
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        line.close()


def test_a_mistake_stays_when_a_right_host_comes_after_a_wrong_one() -> None:
    """The leader's own host may be that one, before anybody has looked."""

    async def come() -> tuple[Door, list[dict[str, Any] | None]]:
        door = Door(
            Hosts(0, 2, port=8476),
            OURS,
            IDENTITY,
            Limits(handshake=120, lost=120),
            Voice("test"),
            lambda member, message: None,
        )
        port = await door.open("127.0.0.1", 0)
        answers = [await knock(door, port, 1, {**IDENTITY, "jax": "0.0.1"}), await knock(door, port, 0, IDENTITY)]
        await door.close(Ending(0))
        return door, answers

    door, (wrong, right) = asyncio.run(come())
    assert wrong is not None
    assert wrong["what"] == "the hosts do not agree: jax"
    assert right is None, "it is let in, and told nothing yet"
    assert list(door.members) == [0]
    assert door.mistake is not None
    assert door.mistake.what == wrong["what"]
