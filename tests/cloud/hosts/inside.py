"""Sockets inside the network namespace of a host, served by this process outside of it.

A socket belongs to the namespace in which it was created, not to the process that uses it. One process can therefore
serve addresses of many hosts: their metadata server, and ports of this machine that the hosts may reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


def listen_inside(namespace: str, address: tuple[str, int]) -> socket.socket:
    """Return a listening socket of the network namespace in the file `namespace`, such as `/proc/7/ns/net`."""

    def listen() -> socket.socket:
        descriptor = os.open(namespace, os.O_RDONLY)
        try:
            if _libc.setns(descriptor, _NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        finally:
            os.close(descriptor)
        return socket.create_server(address, backlog=128)

    # A namespace is entered by one thread, not by the process. The thread ends afterwards, and nothing has to go back.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(listen).result()


class Acceptor:
    """Serves each connection of a listening socket in its own thread, until it is closed."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        close_listening(self._listening)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listening.accept()
            except OSError:
                return
            start_daemon(lambda inner=inner: self._serve(inner))

    def _serve(self, inner: socket.socket) -> None:
        raise NotImplementedError


class Forwarder(Acceptor):
    """Connects each connection to a port of this machine."""

    def __init__(self, listening: socket.socket, port: int) -> None:
        self._port = port
        super().__init__(listening)

    def _serve(self, inner: socket.socket) -> None:
        try:
            outer = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            inner.close()  # as a server that is down: the client gets no answer
            return
        join(inner, outer)


class TunnelProxy(Acceptor):
    """An HTTP proxy for CONNECT alone: package downloads of the hosts go through it to the network of this machine."""

    def _serve(self, inner: socket.socket) -> None:
        request = b""
        try:
            while b"\r\n\r\n" not in request:
                part = inner.recv(4096)
                if not part:
                    raise OSError("the client has gone")
                request += part
            method, target, _ = request.split(b"\r\n", 1)[0].decode().split(" ")
            if method != "CONNECT":
                raise OSError("only CONNECT is served")
            name, port = target.rsplit(":", 1)
            outer = socket.create_connection((name, int(port)), timeout=60)
            outer.settimeout(None)
            inner.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        except (OSError, ValueError):
            inner.close()
            return
        join(inner, outer)


def join(first: socket.socket, second: socket.socket) -> None:
    """Copy between two connections until both are closed."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    other = start_daemon(lambda: copy(second, first))
    copy(first, second)
    other.join()
    first.close()
    second.close()


def close_listening(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listening.close()


def start_daemon(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
