"""What two supervisors say to each other: JSON messages over TCP, each one authenticated, none of them large.

Both sides prove that they know the run's secret before anything is read as a message. A frame is its length, a MAC over
direction, number and content, and the content: nothing can be made up, changed, repeated or left out by others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from typing import Any

from forerun.supervise.secret import Secret, mac, same

MAGIC = b"forerun-1\n"
NONCE_BYTES, MAC_BYTES, LENGTH_BYTES = 32, 32, 4
MOST_BYTES = 1 << 18
LEADER, MEMBER = b"leader", b"member"


class Refused(Exception):
    """The other side is not one of ours."""


class NotForerun(Refused):
    """Something else answers at that address."""


class Line:
    """An authenticated connection. `receive` raises EOFError when it ends and Refused when a frame is not genuine."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, mine: bytes, theirs: bytes
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._mine, self._theirs = mine, theirs
        self._sent = self._received = 0
        _keep_alive(writer)

    def send(self, message: dict[str, Any]) -> None:
        self.send_bytes(json.dumps(message, separators=(",", ":")).encode())

    def send_bytes(self, content: bytes) -> None:
        """Queue one frame without waiting. If the connection is lost, `receive` reports it."""
        if len(content) > MOST_BYTES:
            raise ValueError(f"a message of {len(content)} bytes")
        if self._writer.is_closing():
            return
        proof = mac(self._key, self._mine, self._sent.to_bytes(8, "big"), content)
        self._writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + proof + content)
        self._sent += 1

    async def receive(self) -> dict[str, Any]:
        try:
            message = json.loads(await self.receive_bytes())
        except (ValueError, RecursionError) as error:
            raise Refused("a message that is not JSON, or is nested too deeply") from error
        if not isinstance(message, dict):
            raise Refused("a message that is no object")
        return message

    async def receive_bytes(self) -> bytes:
        """Return the content of the next frame."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if length > MOST_BYTES:
                raise Refused(f"a message of {length} bytes")
            proof = await self._reader.readexactly(MAC_BYTES)
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError from error
        if not same(proof, mac(self._key, self._theirs, self._received.to_bytes(8, "big"), content)):
            raise Refused("a message that is not genuine")
        self._received += 1
        return content

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError:
            return

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close without sending what is still queued."""
        self._writer.transport.abort()


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: Secret) -> Line:
    """The leader's side of a new connection: says nothing but a number before the other has proven itself."""
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + mine)
    theirs, proof = await _read(reader, NONCE_BYTES, MAC_BYTES)
    if not same(proof, secret.mac(MEMBER, mine, theirs)):
        raise Refused("it does not know the secret of this run")
    writer.write(secret.mac(LEADER, mine, theirs))
    return Line(reader, writer, secret.mac(b"session", mine, theirs), LEADER, MEMBER)


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: Secret) -> Line:
    """The other side: also the leader must prove itself."""
    (theirs,) = await _read(reader, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + mine + secret.mac(MEMBER, theirs, mine))
    try:
        proof = await reader.readexactly(MAC_BYTES)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Refused("the leader closed the line: it has another secret") from error
    if not same(proof, secret.mac(LEADER, theirs, mine)):
        raise Refused("the leader has another secret")
    return Line(reader, writer, secret.mac(b"session", theirs, mine), MEMBER, LEADER)


async def _read(reader: asyncio.StreamReader, *lengths: int) -> list[bytes]:
    """Parts of a first frame; ends at the first wrong byte of the magic, so that no other protocol keeps us waiting."""
    try:
        for expected in MAGIC:
            if (await reader.readexactly(1))[0] != expected:
                raise NotForerun("it does not speak as forerun does")
        return [await reader.readexactly(length) for length in lengths]
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError("it said nothing") from error


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
