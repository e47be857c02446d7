"""The worker's end of the line to its supervisor: a socket pair that keeps messages whole."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any, Protocol

VARIABLE = "FORERUN_WORKER"
MOST_BYTES = 1 << 16


def encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


class Channel(Protocol):
    def tell(self, **message: Any) -> None:
        """A sign of life. Never waits: a supervisor that does not read must not hold the training up."""

    def say(self, **message: Any) -> None:
        """Something that must arrive."""


class Nobody:
    """The channel of a process that has no supervisor."""

    def tell(self, **message: Any) -> None:
        return

    say = tell


class SupervisorChannel:
    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # the worker's own children have no part in this
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)

    def tell(self, **message: Any) -> None:
        with suppress(OSError):
            self._socket.send(encoded(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def say(self, **message: Any) -> None:
        with suppress(OSError):
            self._socket.send(encoded(message), socket.MSG_NOSIGNAL)

    def hear(self) -> dict[str, Any] | None:
        """The supervisor's next message; None when it is gone."""
        try:
            packet = self._socket.recv(MOST_BYTES)
        except OSError:
            return None
        return json.loads(packet) if packet else None

    def fileno(self) -> int:
        return self._socket.fileno()
