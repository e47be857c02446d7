"""The line between supervisors: who does not know the secret says nothing that counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from forerun.supervise.protocol.wire import (
    LENGTH_BYTES,
    MAC_BYTES,
    MAGIC,
    MAX_BYTES,
    Line,
    NotForerun,
    Refused,
    Secret,
    admit,
    join,
)

OURS = Secret(b"the secret of this run")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Side = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


async def pair(leader: Side, member: Side) -> tuple[object, object]:
    """What each side came to: its result or its exception."""
    came: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            came.set_result(await leader(reader, writer))
        except Exception as error:
            came.set_result(error)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    async with asyncio.timeout(120):
        try:
            mine: object = await member(reader, writer)
        except Exception as error:
            mine = error
        writer.close()
        theirs = await came
    server.close()
    return theirs, mine


def met(leader: Side, member: Side) -> tuple[object, object]:
    return asyncio.run(pair(leader, member))


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    async def leader(*stream: object) -> object:
        line = await admit(*stream, OURS)  # type: ignore[arg-type]
        line.send({"kind": "start", "text": "é" * 1000})
        return [await line.receive(), await line.receive()]

    async def member(*stream: object) -> object:
        line = await join(*stream, OURS)  # type: ignore[arg-type]
        line.send({"n": 1})
        line.send({"n": 2})
        return await line.receive()

    assert met(leader, member) == ([{"n": 1}, {"n": 2}], {"kind": "start", "text": "é" * 1000})


def test_another_secret_is_refused_on_both_sides() -> None:
    theirs, mine = met(
        lambda reader, writer: admit(reader, writer, OURS),
        lambda reader, writer: join(reader, writer, Secret(b"the secret of another run")),
    )
    assert isinstance(theirs, Refused)
    assert "does not know the secret" in str(theirs)
    assert isinstance(mine, Refused)


def test_a_leader_without_the_secret_is_refused() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(MAGIC + bytes(32))
        await reader.readexactly(len(MAGIC) + 64)
        writer.write(bytes(MAC_BYTES))
        await writer.drain()

    _, mine = met(impostor, lambda reader, writer: join(reader, writer, OURS))
    assert isinstance(mine, Refused)
    assert "another secret" in str(mine)


def test_another_protocol_is_told_apart() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    _, mine = met(web, lambda reader, writer: join(reader, writer, OURS))
    assert isinstance(mine, NotForerun)


def frame(line: Line, message: dict[str, object]) -> bytes:
    """What the line would send."""
    written: list[bytes] = []
    writer = line._writer
    line._writer = type(
        "Tap", (), {"is_closing": lambda self: False, "write": lambda self, data: written.append(data)}
    )()
    line.send(message)
    line._writer = writer
    return written[0]


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "reflected", "made up", "huge"])
def test_a_frame_that_is_not_genuine_ends_the_line(how: str) -> None:
    async def leader(*stream: object) -> object:
        line = await admit(*stream, OURS)  # type: ignore[arg-type]
        return [await line.receive(), await line.receive()]

    async def member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await join(reader, writer, OURS)
        first, second = frame(line, {"n": 1}), frame(line, {"n": 2})
        content = json.dumps({"n": 3}).encode()
        bad = {
            "changed": first + second[:-2] + bytes([second[-2] ^ 1]) + second[-1:],
            "repeated": first + first,
            "left out": second,
            "reflected": first + second[:LENGTH_BYTES] + bytes(MAC_BYTES) + second[LENGTH_BYTES + MAC_BYTES :],
            "made up": len(content).to_bytes(LENGTH_BYTES, "big") + bytes(MAC_BYTES) + content,
            "huge": first + (MAX_BYTES + 1).to_bytes(LENGTH_BYTES, "big") + bytes(MAC_BYTES),
        }
        writer.write(bad[how])
        await writer.drain()
        await reader.read()

    theirs, _ = met(leader, member)
    assert isinstance(theirs, Refused)


def test_a_frame_of_an_earlier_connection_is_refused() -> None:
    """The session key depends on both nonces, so a recorded frame is worth nothing in another connection."""
    recorded: list[bytes] = []

    async def leader(*stream: object) -> object:
        return await (await admit(*stream, OURS)).receive()  # type: ignore[arg-type]

    async def member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await join(reader, writer, OURS)
        recorded.append(frame(line, {"kind": "over"}))
        writer.write(recorded[0])
        await reader.read()

    genuine, _ = met(leader, member)
    assert genuine == {"kind": "over"}
    replayed, _ = met(leader, member)
    assert isinstance(replayed, Refused)
    assert recorded[0] != recorded[1]


@pytest.mark.parametrize("side", ["leader", "member"])
def test_either_nonce_alone_makes_another_session_key(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker who replays one side's handshake cannot choose the other side's nonce."""
    fresh = iter(range(1, 100))
    keys = []

    async def leader(*stream: object) -> object:
        return (await admit(*stream, OURS))._key  # type: ignore[arg-type]

    async def member(*stream: object) -> object:
        return (await join(*stream, OURS))._key  # type: ignore[arg-type]

    for _ in range(2):
        # The leader draws its nonce before it sends anything, and the member after it has received that.
        fixed = bytes(32)
        new = bytes([next(fresh)]) * 32
        drawn = iter([new, fixed] if side == "leader" else [fixed, new])
        monkeypatch.setattr(
            "forerun.supervise.protocol.wire.secrets.token_bytes", lambda size, drawn=drawn: next(drawn)
        )
        theirs, mine = met(leader, member)
        assert theirs == mine
        keys.append(mine)
    assert keys[0] != keys[1]


DEEP = b'{"a":' + b"[" * 120_000 + b"]" * 120_000 + b"}"


@pytest.mark.parametrize("content", [DEEP, b"{", b"\xff", b"[1]", b'{"n":' + b"9" * 10_000 + b"}"])
def test_content_that_is_no_message_is_refused(content: bytes) -> None:
    async def leader(*stream: object) -> object:
        return await (await admit(*stream, OURS)).receive()  # type: ignore[arg-type]

    async def member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (await join(reader, writer, OURS)).send_bytes(content)
        await reader.read()

    theirs, _ = met(leader, member)
    assert isinstance(theirs, Refused)


def test_the_end_of_a_line_is_told_apart_from_a_forgery() -> None:
    async def leader(*stream: object) -> object:
        return await (await admit(*stream, OURS)).receive()  # type: ignore[arg-type]

    theirs, _ = met(leader, lambda reader, writer: join(reader, writer, OURS))
    assert isinstance(theirs, EOFError)
    assert not isinstance(theirs, Refused)


def test_a_secret_does_not_print() -> None:
    assert "secret of this run" not in f"{OURS!r} {OURS}"
