"""A real sshd on a free port, which lets the current user in with one key."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forerun.cloud.provider import HostAddress

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True)
class SshServer:
    """A running sshd. `host_key` is its public key; `identity` the private key that may log in."""

    port: int
    host_key: str
    identity: Path

    def address(self, index: int = 0) -> HostAddress:
        return HostAddress(index, f"{getpass.getuser()}@127.0.0.1", "10.0.0.1", self.port)


def new_key(file: Path) -> str:
    """Create a key pair and return its public key."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(file)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return file.with_suffix(".pub").read_text().strip()


@contextmanager
def ssh_server(folder: Path, port: int | None = None) -> Iterator[SshServer]:
    """Start sshd in the foreground, wait until it listens, and end it with all its connections."""
    assert SSHD is not None, "apt install openssh-server"
    folder.mkdir(parents=True, exist_ok=True)
    host_key = new_key(folder / "host_key")
    (folder / "authorized").write_text(new_key(folder / "identity") + "\n")
    port = port or free_port()
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd of root refuses to start without it
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "MaxStartups": "100",
        "UseDNS": "no",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log)
        try:
            _wait_until_it_listens(process, port)
            yield SshServer(port, " ".join(host_key.split()[:2]), folder / "identity")
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    while True:
        assert process.poll() is None, "sshd ended"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as opened:
                opened.recv(1)
                return
        except OSError:
            pass
