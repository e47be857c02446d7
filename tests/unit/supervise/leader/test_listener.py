"""Tests of the leader's port, over real connections."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.leader_view import Event, LeaderView, update
from forerun.supervise.leader.listener import MAX_PENDING_CONNECTIONS, Listener
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Ending
from forerun.supervise.protocol.tunnel import TunnelExit
from forerun.supervise.protocol.wire import MAGIC, NONCE_BYTES, Secret, join

pytestmark = pytest.mark.timing

OURS = Secret(b"the secret of this run")
IDENTITY = {"jax": "0.10.2", "job": "1"}
HELLO = {"kind": "Hello", "index": 1, "count": 2, "instance": "1", "name": "vm", "pid": 1, "identity": IDENTITY}


class Picture:
    """The leader's picture of the hosts, without a leader that decides."""

    def __init__(self, hosts: Hosts, limits: Limits) -> None:
        self.view = LeaderView.at_start(hosts, limits, 0, "", 0.0)
        self.listener: Listener

    def update(self, event: Event) -> None:
        self.view = update(self.view, event, time.monotonic())


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Picture, int]]:
    """A listener with its picture and its port. Fails if a connection ends with an exception that nobody handles."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    console = Console("test")
    limits = Limits(handshake=120, lost=120)
    hosts = Hosts(0, 2, port=8476)
    picture = Picture(hosts, limits)
    listener = Listener(
        hosts, OURS, IDENTITY, limits, console, picture.update, lambda: picture.view.members, TunnelExit(Path())
    )
    picture.listener = listener
    port = await listener.open("127.0.0.1", 0)
    async with asyncio.timeout(120):
        yield picture, port
    await listener.close(Ending(0))
    console.close()
    assert unhandled == []


async def connect(picture: Picture, port: int, index: int, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what the leader sends to this host, or None if it is admitted and receives nothing for a moment."""
    line = await join(*await asyncio.open_connection("127.0.0.1", port), OURS)
    line.send({**HELLO, "index": index, "instance": f"{index}", "identity": dict(identity)})
    answer = asyncio.create_task(line.receive())
    while not answer.done() and index not in picture.view.members:
        await asyncio.sleep(0.01)
    await asyncio.wait([answer], timeout=0.2)
    try:
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        line.close()


def test_a_mistake_stays_when_a_right_host_comes_after_a_wrong_one() -> None:
    """The leader's own host may be that one, before anybody has looked."""

    async def come() -> None:
        async with opened() as (picture, port):
            wrong = await connect(picture, port, 1, {**IDENTITY, "jax": "0.0.1"})
            right = await connect(picture, port, 0, IDENTITY)
            assert wrong is not None
            assert wrong["what"] == "the hosts do not agree: jax"
            assert right is None, "it is let in, and told nothing yet"
            assert list(picture.view.members) == [0]
            assert picture.view.mistake is not None
            assert picture.view.mistake.what == wrong["what"]

    asyncio.run(come())


@pytest.mark.parametrize(
    ("identity", "differs"),
    [
        ({**IDENTITY, "libtpu": "0.0.41"}, "libtpu"),  # the leader has none
        ({"job": "1"}, "jax"),  # the host has none
        ({}, "jax"),
        ({**IDENTITY, "job": "2"}, "job"),
    ],
)
def test_a_part_of_the_identity_that_only_one_side_has_is_a_difference(identity: dict[str, str], differs: str) -> None:
    async def come() -> None:
        async with opened() as (picture, port):
            answer = await connect(picture, port, 1, identity)
            assert answer is not None
            assert (answer["kind"], answer["code"]) == ("Ending", 2)
            assert answer["what"].endswith(f": {differs}")
            assert picture.view.members == {}
            assert picture.view.mistake is not None

    asyncio.run(come())


def test_one_address_has_a_limited_number_of_unauthenticated_connections() -> None:
    async def greeted(port: int, address: str) -> tuple[bool, asyncio.StreamWriter]:
        """Return whether the leader sends anything to a new connection from this address, and the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        try:
            first = await reader.read(1)
        except ConnectionResetError:
            first = b""
        if first:
            assert (first + await reader.readexactly(len(MAGIC) + NONCE_BYTES - 1)).startswith(MAGIC)
        return first != b"", writer

    async def come() -> None:
        async with opened() as (picture, port):
            idle = [await greeted(port, "127.0.0.1") for _ in range(16)]
            assert MAX_PENDING_CONNECTIONS == 16
            assert [found for found, _ in idle] == [True] * 16
            further = [await greeted(port, "127.0.0.1") for _ in range(3)]
            assert [found for found, _ in further] == [False] * 3
            other, writer = await greeted(port, "127.0.0.2")
            assert other, "another address has its own limit"
            for closing in (writer, *(writer for _, writer in (*idle, *further))):
                closing.close()
            while picture.listener._pending_connections:
                await asyncio.sleep(0.01)
            assert await connect(picture, port, 0, IDENTITY) is None
            assert list(picture.view.members) == [0]

    asyncio.run(come())


HOSTILE = {
    "nested": b"[" * 200_000,
    "nested in an object": b'{"kind":' + b"[" * 120_000 + b"]" * 120_000 + b"}",
    "no kind": b"{}",
    "tunnel without an attempt": b'{"kind":"OpenTunnel"}',
    "tunnel of an infinite attempt": b'{"kind":"OpenTunnel","attempt":1e999}',
    **{
        f"{name} {value}": json.dumps(HELLO)
        .replace(json.dumps({name: HELLO[name]})[1:-1], f'"{name}": {value}')
        .encode()
        for name, value in [
            ("index", "1e999"),
            ("index", "-1e999"),
            ("index", "NaN"),
            ("index", "1.5"),
            ("index", "-1"),
            ("index", "2"),
            ("count", "1e999"),
            ("pid", "1e999"),
            ("name", "[]"),
            ("instance", "{}"),
            ("identity", "[]"),
            ("identity", '"jax"'),
        ]
    },
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_first_message_with_wrong_values_closes_only_its_own_connection(content: bytes) -> None:
    assert content != json.dumps(HELLO).encode()

    async def come() -> None:
        async with opened() as (picture, port):
            line = await join(*await asyncio.open_connection("127.0.0.1", port), OURS)
            line.send_bytes(content)
            with pytest.raises(EOFError):
                await line.receive()
            line.close()
            assert (picture.view.members, picture.view.mistake) == ({}, None)
            assert await connect(picture, port, 1, IDENTITY) is None
            assert list(picture.view.members) == [1]

    asyncio.run(come())
