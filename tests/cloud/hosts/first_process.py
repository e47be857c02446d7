"""The first process of a host: makes its file tree, starts sshd, runs the startup script, and shuts the host down.

`unshare` starts it with namespaces of its own for mounts, processes, network and host name. Its argument is the host's
folder, which has `host.json`. It needs only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

METADATA = "http://169.254.169.254/computeMetadata/v1/instance/"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    mount_on(source, target, kind, flags, options)


def mount_on(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    values = [one.encode() for one in (source, str(target), kind)]
    if _libc.mount(*values, ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {source} on {target}")


def inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def make_tree(folder: Path, host: dict[str, Any]) -> None:
    """Make a copy-on-write tree of this machine's files, without its home folders and the repository, and enter it."""
    mount_on("none", Path("/"), "none", _RECURSIVE | _PRIVATE)
    root = folder / "root"
    for name in ("changes", "work", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir=/,upperdir={folder / 'changes'},workdir={folder / 'work'}"
    mount("overlay", root, "overlay", 0, layers)
    mount("/dev", inside(root, "/dev"), "none", _BIND | _RECURSIVE)
    mount("/sys", inside(root, "/sys"), "none", _BIND | _RECURSIVE)
    mount("proc", inside(root, "/proc"), "proc")
    for name in ("/root", "/home", "/tmp", "/run", "/dev/shm", *host["hidden"]):
        mount("tmpfs", inside(root, name), "tmpfs", 0, "mode=1777" if name in ("/tmp", "/dev/shm") else "mode=0755")
    for name in host["visible"]:  # the interpreter of this machine, the shared cache
        mount(name, inside(root, name), "none", _BIND | _RECURSIVE)
    for target, source in host["copies"].items():
        program = inside(root, target)
        program.unlink(missing_ok=True)
        shutil.copyfile(source, program)
        program.chmod(0o755)
    os.chroot(root)
    os.chdir("/")


def write_files(host: dict[str, Any]) -> None:
    shutil.rmtree("/etc/systemd/system", ignore_errors=True)
    Path("/etc/systemd/system").mkdir(parents=True)
    Path("/etc/hosts").write_text(
        f"127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n{host['internal']} {host['name']}\n"
    )
    Path("/etc/default").mkdir(exist_ok=True)
    # The startup script reads it as a shell does, and units as systemd does: both accept these quotes.
    lines = [f"{key}={shlex.quote(value)}\n" for key, value in host["environment"].items()]
    Path("/etc/default/forerun").write_text("".join(lines))
    for target, content in host["files"].items():
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(content)
    interpreter, script = host["interpreter"]
    Path(script).unlink(missing_ok=True)
    Path(script).write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
    Path(script).chmod(0o755)
    for target, source in host["links"].items():
        Path(target).unlink(missing_ok=True)
        Path(target).symlink_to(source)
    for old in ("/var/lib/forerun", "/opt/forerun", "/var/log/forerun"):
        shutil.rmtree(old, ignore_errors=True)
    if place := host["software"]:
        # A link, not a mount: files of the shared cache can only be hard links inside one mount.
        Path(place).mkdir(parents=True, exist_ok=True)
        Path("/opt").mkdir(exist_ok=True)
        Path("/opt/forerun").symlink_to(place)


def start_network(host: dict[str, Any]) -> None:
    """Wait until the link is there, and set its addresses."""
    while "eth0" not in [name for _, name in socket.if_nameindex()]:
        time.sleep(0.01)
    for command in (
        "link set lo up",
        "addr add 169.254.169.254/32 dev lo",
        f"addr add {host['internal']}/24 dev eth0",
        f"addr add {host['external']}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {host['gateway']}",
    ):
        run("ip", *command.split(), check=True)
    socket.sethostname(host["name"])


def start_sshd() -> subprocess.Popen[bytes]:
    """Start sshd with a new host key, and publish the key as guest attribute, as the guest agent does."""
    folder = Path("/etc/ssh/host")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    key = folder / "ssh_host_ed25519_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key), check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / "sshd_config"
    config.write_text(
        f"HostKey {key}\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin no\nPidFile none\n"
        "AuthorizedKeysFile .ssh/authorized_keys\nMaxStartups 100\nUseDNS no\nPrintMotd no\n"
        "Subsystem sftp internal-sftp\n"
    )
    server = shutil.which("sshd", path=PATH)
    assert server is not None, "openssh-server is not installed"
    started = subprocess.Popen([server, "-D", "-e", "-f", str(config)], env={"PATH": PATH})
    while True:
        try:
            socket.create_connection(("127.0.0.1", 22), timeout=1).close()
            break
        except OSError:
            time.sleep(0.01)
    kind, content = Path(f"{key}.pub").read_text().split()[:2]
    put = urllib.request.Request(
        f"{METADATA}guest-attributes/hostkeys/{kind}",
        data=content.encode(),
        method="PUT",
        headers={"Metadata-Flavor": "Google"},
    )
    urllib.request.urlopen(put).close()
    return started


def make_users(keys: str) -> None:
    """Make an account for each line `user:key` of the metadata `ssh-keys`, as the guest agent does."""
    for line in keys.splitlines():
        user, _, key = line.partition(":")
        if not key:
            continue
        if run("id", "-u", user) != 0:
            run("useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", user, check=True)
        home = Path(os.path.expanduser(f"~{user}"))
        (home / ".ssh").mkdir(exist_ok=True, mode=0o700, parents=True)
        with (home / ".ssh" / "authorized_keys").open("a") as file:
            file.write(f"{key}\n")
        run("chown", "-R", f"{user}:", str(home), check=True)


def run(*command: str, check: bool = False) -> int:
    done = subprocess.run(command, env={"PATH": PATH}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if check and done.returncode:
        raise OSError(f"{command}: {done.stderr.decode()}")
    return done.returncode


def attribute(name: str) -> str:
    request = urllib.request.Request(f"{METADATA}attributes/{name}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError:
        return ""


def start_script() -> subprocess.Popen[bytes] | None:
    """Run the metadata `startup-script` as the guest agent does: as root, from a file, without HOME."""
    text = attribute("startup-script")
    if not text:
        return None
    script = Path("/tmp/metadata-scripts/startup-script")
    script.parent.mkdir(mode=0o700, exist_ok=True)
    script.write_text(text)
    script.chmod(0o700)
    with open("/var/log/startup-script.log", "ab") as log:
        return subprocess.Popen([script], env={"PATH": PATH, "LANG": "C.UTF-8"}, cwd="/", stdout=log, stderr=log)


def main() -> None:
    folder = Path(sys.argv[1])
    host = json.loads((folder / "host.json").read_text())
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    start_network(host)
    (folder / "network").touch()
    while not (folder / "metadata").exists():  # the metadata server of this host listens
        time.sleep(0.01)
    make_tree(folder, host)
    write_files(host)
    make_users(attribute("ssh-keys"))
    start_sshd()
    script = start_script()
    while not ending:
        reap(script)
        # The process that started the host holds the other end of this pipe. When it ends, also by a signal, so does
        # the host.
        if select.select([sys.stdin], [], [], 0.05)[0]:
            return
    # As systemd at power off: the units are stopped, each with its own limit.
    units = Path("/run/units")
    names = [path.name.removesuffix(".json") for path in units.glob("*.json") if not path.name.startswith(".")]
    stopping = [subprocess.Popen(["/usr/bin/systemctl", "stop", name], env={"PATH": PATH}) for name in names]
    for one in stopping:
        one.wait()


def reap(script: subprocess.Popen[bytes] | None) -> None:
    """Collect processes whose parents have ended. Only the script's exit code is of interest."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if script is not None and pid == script.pid:
            Path("/run/startup-script.exit").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
