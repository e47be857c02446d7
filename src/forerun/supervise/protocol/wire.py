"""Authenticated TCP connections between supervisors. They carry the JSON objects that `messages` defines.

Both sides prove that they know the run's secret before either of them reads a message. A frame has a length, a MAC and
the content. The MAC (message authentication code) covers the direction, the number of the frame and the content. A
third party therefore cannot forge, change, repeat or remove a frame unnoticed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.files import open_regular

SECRET_VARIABLE = "FORERUN_SECRET"
LEAST_SECRET_BYTES = 16


class Secret:
    """A secret that `repr` and logs do not show."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(***)"

    def mac(self, *parts: bytes) -> bytes:
        """Return the MAC of `parts`, with this secret as the key."""
        return mac(self._value, *parts)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of `parts`."""
    # Each part follows its length, so two different lists of parts never give the same bytes.
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, content, hashlib.sha256)


def same(first: bytes, second: bytes) -> bool:
    """Return whether two MACs are equal, in a time that does not depend on their content."""
    return hmac.compare_digest(first, second)


def new_secret() -> Secret:
    """Return a random secret, for a run on one host."""
    return Secret(secrets.token_bytes(32))


def read_secret(file: Path | None, environment: MutableMapping[str, str] = os.environ) -> Secret:
    """Return the secret of a run on several hosts.

    Args:
        file: A file that only its owner can access, or None to read the variable FORERUN_SECRET.
        environment: The variable is removed from it, so that child processes do not inherit the secret.

    Raises:
        UserError: No secret was given, it is too short, or other users can access the file.
    """
    given = environment.pop(SECRET_VARIABLE, None)
    if file is not None:
        return _checked(_read_secret(file), str(file))
    if given is None:
        raise UserError(
            "E-HOSTS-024",
            "a run on several hosts needs a secret",
            why=f"neither a secret file nor {SECRET_VARIABLE} was given: anybody on the network could end the run",
            fix="on one host: (umask 077; head -c 32 /dev/urandom | base64 > secret), then copy it to the others",
        )
    return _checked(given.strip().encode(), SECRET_VARIABLE)


def _read_secret(file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(
                    "E-HOSTS-025",
                    f"{file} can be read by others",
                    why=f"its mode is {stat.S_IMODE(mode):04o}, and it is the secret of this run",
                    fix=f"chmod 600 {file}",
                )
            return opened.read(4096).strip()
    except OSError as error:
        raise UserError(
            "E-HOSTS-026",
            f"the secret of this run cannot be read: {file}",
            why=str(error.strerror),
            fix="copy the same file to every host, mode 0600",
        ) from error


def _checked(value: bytes, where: str) -> Secret:
    if len(value) < LEAST_SECRET_BYTES:
        raise UserError(
            "E-HOSTS-027",
            f"the secret in {where} is too short",
            why=f"{len(value)} characters; at least {LEAST_SECRET_BYTES} are needed",
            fix="make a new one: (umask 077; head -c 32 /dev/urandom | base64 > secret)",
        )
    return Secret(value)


MAGIC = b"forerun-1\n"
NONCE_BYTES, MAC_BYTES, LENGTH_BYTES = 32, 32, 4
MAX_BYTES = 1 << 18
LEADER, MEMBER = b"leader", b"member"


class Refused(Exception):
    """The peer failed to authenticate itself, or it sent an invalid frame."""


class NotForerun(Refused):
    """The peer does not use the protocol of forerun."""


class Line:
    """An authenticated connection. `receive` raises EOFError when it closes, and Refused for an invalid frame."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, mine: bytes, theirs: bytes
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._mine, self._theirs = mine, theirs
        self._sent = self._received = 0
        _keep_alive(writer)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a JSON object without waiting."""
        self.send_bytes(json.dumps(message, separators=(",", ":")).encode())

    def send_bytes(self, content: bytes) -> None:
        """Queue one frame without waiting. A lost connection is ignored here, because `receive` reports it."""
        if len(content) > MAX_BYTES:
            raise ValueError(f"a message of {len(content)} bytes")
        if self._writer.is_closing():
            return
        proof = mac(self._key, self._mine, self._sent.to_bytes(8, "big"), content)
        self._writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + proof + content)
        self._sent += 1

    async def receive(self) -> dict[str, Any]:
        """Return the next JSON object. Raise Refused if the next frame contains something else."""
        try:
            message = json.loads(await self.receive_bytes())
        except (ValueError, RecursionError) as error:
            raise Refused("a message that is not JSON, or is nested too deeply") from error
        if not isinstance(message, dict):
            raise Refused("a message that is not a JSON object")
        return message

    async def receive_bytes(self) -> bytes:
        """Return the content of the next frame. Raise EOFError if the connection closes, or Refused."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if length > MAX_BYTES:
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
        """Wait until the queue has space. A lost connection is ignored."""
        try:
            await self._writer.drain()
        except OSError:
            return

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close the connection and discard queued frames."""
        self._writer.transport.abort()


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: Secret) -> Line:
    """Authenticate the peer of a new connection, as the leader.

    The leader sends only a nonce until the peer has proven that it knows the secret.

    Raises:
        Refused: The peer does not know the secret, or it does not use this protocol (NotForerun).
        EOFError: The peer closed the connection.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + mine)
    theirs, proof = await _read(reader, NONCE_BYTES, MAC_BYTES)
    if not same(proof, secret.mac(MEMBER, mine, theirs)):
        raise Refused("it does not know the secret of this run")
    writer.write(secret.mac(LEADER, mine, theirs))
    return Line(reader, writer, secret.mac(b"session", mine, theirs), LEADER, MEMBER)


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: Secret) -> Line:
    """Authenticate a new connection to the leader, which must prove that it knows the secret too.

    Raises:
        Refused: The leader has another secret, or the peer is not a forerun leader (NotForerun).
        EOFError: The peer closed the connection without an answer.
    """
    (theirs,) = await _read(reader, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + mine + secret.mac(MEMBER, theirs, mine))
    try:
        proof = await reader.readexactly(MAC_BYTES)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Refused("the leader closed the connection: it has another secret") from error
    if not same(proof, secret.mac(LEADER, theirs, mine)):
        raise Refused("the leader has another secret")
    return Line(reader, writer, secret.mac(b"session", theirs, mine), MEMBER, LEADER)


async def _read(reader: asyncio.StreamReader, *lengths: int) -> list[bytes]:
    """Return the parts of the first frame after its magic bytes.

    The first wrong magic byte raises NotForerun, so a peer with another protocol cannot keep this process waiting.
    """
    try:
        for expected in MAGIC:
            if (await reader.readexactly(1))[0] != expected:
                raise NotForerun("it does not use the protocol of forerun")
        return [await reader.readexactly(length) for length in lengths]
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError("it closed the connection") from error


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
