"""The worker's end of the channel to its supervisor: a Unix socket pair that preserves message boundaries."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Protocol

from forerun.supervise.protocol.json_form import decode_from_supervisor, encode
from forerun.supervise.protocol.messages import FromSupervisor, FromWorker, Message

VARIABLE = "FORERUN_WORKER"
MAX_BYTES = 1 << 16


def encode_packet(message: Message) -> bytes:
    """Return the packet that carries a message."""
    return json.dumps(encode(message), separators=(",", ":")).encode()


class Channel(Protocol):
    """The interface through which a worker sends messages to its supervisor."""

    def tell(self, message: FromWorker) -> None:
        """Send a message without blocking, or drop it. A supervisor that does not read must not delay training."""

    def say(self, message: FromWorker) -> None:
        """Send a message that must arrive. Block until the socket accepts it."""


class NullChannel:
    """A channel that discards all messages, for a process without a supervisor."""

    def tell(self, message: FromWorker) -> None:
        return

    say = tell


class SupervisorChannel:
    """The channel of a supervised worker, on a socket that it inherits from its supervisor."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # child processes of the worker must not inherit it
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)

    def tell(self, message: FromWorker) -> None:
        with suppress(OSError):
            self._socket.send(encode_packet(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def say(self, message: FromWorker) -> None:
        with suppress(OSError):
            self._socket.send(encode_packet(message), socket.MSG_NOSIGNAL)

    def hear(self) -> FromSupervisor | None:
        """Wait for the next message of the supervisor and return it. Return None if the supervisor has exited."""
        try:
            packet = self._socket.recv(MAX_BYTES)
        except OSError:
            return None
        return decode_from_supervisor(json.loads(packet)) if packet else None

    def fileno(self) -> int:
        return self._socket.fileno()
