"""Commands on a host by the system's OpenSSH. The host must prove one of its pinned keys."""

from __future__ import annotations

import enum
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.cloud.one_line import require_one_line
from forerun.cloud.provider import HostAddress
from forerun.cloud.ssh.keys import require_openssh
from forerun.errors import UserError

USER = "forerun"
CONNECT_SECONDS = 15
NO_CONNECTION = 255  # the exit code of ssh itself; commands have others


class Trouble(enum.Enum):
    """Why a connection failed."""

    UNREACHABLE = "unreachable"  # the machine starts, or a firewall drops the packets
    REFUSED_KEY = "refused key"  # the machine does not have the run's public key (yet)
    CHANGED_HOST_KEY = "changed host key"  # another machine answers at the address


@dataclass(frozen=True)
class IapTunnel:
    """Connections through Google's Identity-Aware Proxy, for machines without an external address."""

    project: str
    zone: str

    def proxy_command(self, instance: str) -> str:
        """Return the command that OpenSSH connects through. `%p` is the port."""
        words = ["gcloud", "compute", "start-iap-tunnel", instance, "%p", "--listen-on-stdin"]
        return shlex.join([*words, f"--project={self.project}", f"--zone={self.zone}", "--verbosity=warning"])


@dataclass(frozen=True)
class HostAccess:
    """How to reach one host and how to know it.

    Attributes:
      host_keys: the public keys that the host may prove, as `ssh-ed25519 AAAA...`.
      identity: the private key file of the user; None: the keys of the user's own ssh configuration.
      user: of the connection, if the address names none.
    """

    host: HostAddress
    host_keys: tuple[str, ...]
    identity: Path | None
    user: str = USER
    tunnel: IapTunnel | None = None


@dataclass(frozen=True)
class SshAnswer:
    """The result of a command on a host. `trouble` is None if the host was reached."""

    exit_code: int
    output: str
    errors: str
    trouble: Trouble | None


def run_on(
    access: HostAccess, command: str, write: Callable[[IO[bytes]], None] | None = None, *, limit_seconds: float = 600.0
) -> SshAnswer:
    """Run a shell command on a host and return its result. Secrets travel only through `write`, never in `command`.

    Args:
      write: writes the standard input of the command.
      limit_seconds: the command is ended after this time and counts as unreachable.

    Raises:
      UserError: no key of the host is known, or OpenSSH is not installed.
    """
    require_openssh()
    with known_hosts(access) as known:
        words = ssh_command(access, known, command)
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timer = threading.Timer(limit_seconds, process.kill)
        timer.start()
        try:
            writer = threading.Thread(target=_feed, args=(process, write), daemon=True)
            writer.start()
            assert process.stdout is not None
            assert process.stderr is not None
            errors: list[bytes] = []
            reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
            reader.start()
            output = process.stdout.read()
            code = process.wait()
            reader.join()
            writer.join()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    _close(stream)
    text = b"".join(errors).decode(errors="replace").strip()
    code = NO_CONNECTION if code < 0 else code
    return SshAnswer(code, output.decode(errors="replace"), text, trouble_in(code, text))


def trouble_in(exit_code: int, errors: str) -> Trouble | None:
    """Return why ssh could not connect, from its exit code and its messages."""
    if exit_code != NO_CONNECTION:
        return None
    if "Host key verification failed" in errors or "HOST IDENTIFICATION HAS CHANGED" in errors:
        return Trouble.CHANGED_HOST_KEY
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        return Trouble.REFUSED_KEY
    return Trouble.UNREACHABLE


def ssh_command(access: HostAccess, known: Path, command: str) -> list[str]:
    """Return the command line of ssh. Only the pinned keys count, and it never asks a question."""
    host = access.host
    user, at, address = host.address.rpartition("@")
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(known),
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": host_alias(host),
        "CheckHostIP": "no",
        "UpdateHostKeys": "no",
        "VerifyHostKeyDNS": "no",
        "ConnectTimeout": str(CONNECT_SECONDS),
        # Without these, a machine that disappears during a transfer would block the controller.
        "ServerAliveInterval": "10",
        "ServerAliveCountMax": "3",
        "Compression": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "ControlMaster": "no",
        "ControlPath": "none",
        "RequestTTY": "no",
        "LogLevel": "ERROR",
    }
    tunnel = access.tunnel or IapTunnel("", "")
    require_one_line({"an address of ssh": (host.address, host.instance, access.user, tunnel.project, tunnel.zone)})
    words = ["ssh"]
    if access.identity is not None:
        # The key of the run only: the user's configuration and agent have other keys and options.
        words += ["-F", "none"]
        options |= {"IdentitiesOnly": "yes", "IdentityAgent": "none", "IdentityFile": str(access.identity)}
        options |= {"PreferredAuthentications": "publickey"}
    if access.tunnel is not None:
        options["ProxyCommand"] = access.tunnel.proxy_command(host.instance or address)
    words += [word for name, value in options.items() for word in ("-o", f"{name}={_value(value)}")]
    return [*words, "-p", str(host.port), "-l", user if at else access.user, "--", address, command]


def host_alias(host: HostAddress) -> str:
    return f"forerun-host-{host.index}"


@contextmanager
def known_hosts(access: HostAccess) -> Iterator[Path]:
    """Write the pinned keys of a host to a temporary file.

    Raises:
      UserError: no key is known, so another machine could answer in its place.
    """
    if not access.host_keys:
        raise UserError(
            "E-CLOUD-036",
            f"the ssh host key of {access.host.address} is not known",
            why="without it, another machine could answer at this address and receive the secrets of the job",
            fix="allow guest attributes in the project (constraints/compute.disableGuestAttributesAccess); "
            "for your own machines, set host_key in the machines file: ssh-keyscan -t ed25519 ADDRESS",
        )
    lines = [f"{host_alias(access.host)} {' '.join(key.split()[:2])}\n" for key in access.host_keys]
    file, name = tempfile.mkstemp(prefix="forerun-known-hosts-")
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.writelines(lines)
        yield Path(name)
    finally:
        os.unlink(name)


def _value(text: str) -> str:
    """Return a value of an option as `-o` reads it: a path with spaces needs quotes, a command does not."""
    return f'"{text}"' if " " in text and text.startswith("/") else text


def _feed(process: subprocess.Popen[bytes], write: Callable[[IO[bytes]], None] | None) -> None:
    assert process.stdin is not None
    try:
        if write is not None:
            write(process.stdin)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the command ended without reading everything; its exit code says why
    finally:
        _close(process.stdin)


def _close(stream: IO[bytes]) -> None:
    with suppress(OSError):  # the other end is closed, and content was not flushed
        stream.close()
