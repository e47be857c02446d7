"""The provider of existing machines: it claims them for a run and releases them. The zone is the file of machines."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forerun.cloud.provider import (
    CloudUnavailable,
    Failure,
    HostAddress,
    RequestRefused,
    Resource,
    SliceRequest,
    SliceState,
    SliceStatus,
)
from forerun.cloud.record.entries import Option
from forerun.cloud.ssh.connection import HostAccess, SshAnswer, Trouble, run_on
from forerun.cloud.ssh.delivery import PARALLEL, require_same_host
from forerun.cloud.ssh.keys import require_openssh
from forerun.config.source import read_file
from forerun.errors import UserError

PROVIDER = "ssh"
_KEYS = {"address", "internal", "port", "host_key"}
_HOST_KEY = re.compile(r"(ssh-|ecdsa-|sk-)[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( .*)?")
_ADDRESS = re.compile(r"(?:[A-Za-z_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9.:-]*")


@dataclass(frozen=True)
class SshMachine:
    """An existing machine.

    Attributes:
      address: of ssh: `HOST` or `USER@HOST`. The user is root, or may use sudo without a password.
      internal: how the other machines reach it.
      host_keys: keys that it may prove; empty: those of the user's `known_hosts`.
    """

    address: str
    internal: str
    port: int
    host_keys: tuple[str, ...]

    @property
    def host(self) -> str:
        """The address without the user."""
        return self.address.rpartition("@")[2]


def read_machines(file: Path) -> tuple[SshMachine, ...]:
    """Return the machines in a file, in the order of their host index.

    Raises:
      UserError: the file cannot be read, or is not a list of machines.
    """
    tree = read_file(file).tree
    entries = tree.get("machines") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries or set(tree) != {"machines"}:
        raise _mistake(file, "it needs one key, `machines`, with a list")
    machines = tuple(_machine(file, number, entry) for number, entry in enumerate(entries))
    if len({(machine.host, machine.port) for machine in machines}) < len(machines):
        raise _mistake(file, "two machines have the same address")
    return machines


def machine_option(file: str) -> Option:
    """Return the option of a run on the machines of a file. They cost nothing, and their zone is the file."""
    path = Path(file).expanduser().resolve()
    count = len(read_machines(path))
    return Option(PROVIDER, f"{count} machine{'s' if count > 1 else ''}", str(path), "on-demand", count, 0.0)


def known_keys(machine: SshMachine) -> tuple[str, ...]:
    """Return the host keys of a machine, from the file or from the user's `known_hosts`."""
    if machine.host_keys:
        return machine.host_keys
    require_openssh()
    name = machine.host if machine.port == 22 else f"[{machine.host}]:{machine.port}"
    found = subprocess.run(["ssh-keygen", "-F", name], capture_output=True, encoding="utf-8", errors="replace")
    # A line has the names, the type and the key. Lines with a marker, such as @revoked, are not keys of the host.
    lines = [line.split() for line in found.stdout.splitlines() if not line.startswith(("#", "@"))]
    return tuple(f"{words[1]} {words[2]}" for words in lines if len(words) >= 3)


def _machine(file: Path, number: int, entry: Any) -> SshMachine:
    values = {"address": entry} if isinstance(entry, str) else entry
    place = f"machine {number}"
    if not isinstance(values, dict) or not set(values) <= _KEYS or not isinstance(values.get("address"), str):
        raise _mistake(file, f"{place} needs an address; the other keys are internal, port and host_key")
    address, port, key = values["address"], values.get("port", 22), values.get("host_key")
    if not _ADDRESS.fullmatch(address):
        raise _mistake(file, f"{place}: the address {address!r} is not HOST or USER@HOST")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise _mistake(file, f"{place}: the port {port!r} is not a number from 1 to 65535")
    if key is not None and not (isinstance(key, str) and _HOST_KEY.fullmatch(key)):
        raise _mistake(file, f"{place}: host_key is not a public key such as `ssh-ed25519 AAAA...`")
    internal = values.get("internal", address.rpartition("@")[2])
    return SshMachine(address, str(internal), port, () if key is None else (" ".join(key.split()[:2]),))


def _mistake(file: Path, why: str) -> UserError:
    return UserError(
        "E-CLOUD-038",
        f"{file} is not a file of machines",
        why=why,
        fix="write for example:\nmachines:\n  - address: root@10.0.0.5\n    host_key: ssh-ed25519 AAAA...",
    )


SCRIPT = Path(__file__).parent / "machine.sh"
COMMAND = 'if [ "$(id -u)" = 0 ]; then exec bash -s; else exec sudo -n bash -s; fi'
_IN_USE = 79  # exit code of the script
_PLACE = re.compile(r"@([A-Z]+)@")


class SshProvider:
    """Machines of the user. A claim on each machine says which run uses it, so every controller sees the same state.

    Args:
      files: the files of machines that `list` reads, besides those that were used.
      identity: the private key of the user; None: the user's own ssh configuration.
      root: the folder of the machines' file tree, for tests.
    """

    def __init__(self, files: Sequence[str] = (), identity: Path | None = None, root: str = "") -> None:
        self._files = dict.fromkeys(files)
        self._identity, self._root = identity, root

    @property
    def name(self) -> str:
        return PROVIDER

    def now(self) -> float:
        """Return the time of this machine: nothing is billed."""
        return time.time()

    def enforces_limit(self, request: SliceRequest) -> bool:
        return False

    def create(self, request: SliceRequest) -> None:
        """Claim the machines, let the run's key in, and start the startup script."""
        machines = self._machines(request.zone)
        answers = self._run(machines, [self._claim(request, machines, index) for index in range(len(machines))])
        for machine, answer in zip(machines, answers, strict=True):
            if answer.exit_code == _IN_USE:
                owner = _claim_in(answer.output).get("name", "another run")
                self.delete(request.name, request.zone)
                raise RequestRefused(Failure.CAPACITY, f"{machine.address} is used by {owner}")
        _require_success(machines, answers)

    def status(self, name: str, zone: str) -> SliceStatus:
        claims = self._claims(zone)
        mine = [claim for claim in claims if claim.get("name") == name]
        if not mine:
            return SliceStatus(SliceState.ABSENT)
        if len(mine) < len(claims):
            return SliceStatus(SliceState.CREATING, f"{len(mine)} of {len(claims)} machines are claimed")
        return SliceStatus(SliceState.READY, "claimed", ready_at=float(str(mine[0].get("created_at", self.now()))))

    def delete(self, name: str, zone: str) -> float | None:
        """Stop the run's services, and remove its job, secrets, key and claim. The machines continue to run."""
        machines = self._machines(zone)
        answers = self._run(machines, [self._script("release", NAME=name)] * len(machines))
        _require_success(machines, answers)
        left = [machine.address for machine, answer in zip(machines, answers, strict=True) if _has(answer, name)]
        if left:
            raise CloudUnavailable(f"{left[0]} is still claimed by {name}")
        return None

    def list(self) -> Sequence[Resource]:
        found: dict[tuple[str, str], Resource] = {}
        for zone in list(self._files):
            for claim in self._claims(zone):
                if name := str(claim.get("name", "")):
                    found[zone, name] = Resource(
                        PROVIDER,
                        "machine",
                        name,
                        zone,
                        SliceStatus(SliceState.READY, "claimed"),
                        labels=_texts(claim.get("labels")),
                        metadata=_texts(claim.get("metadata")),
                        slice=str(claim.get("slice", "")),
                        capacity="on-demand",
                        created_at=float(str(claim.get("created_at", 0))),
                        costs_money=False,
                    )
        return list(found.values())

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        machines = self._machines(zone)
        return [HostAddress(index, one.host, one.internal, one.port) for index, one in enumerate(machines)]

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        return [known_keys(machine) for machine in self._machines(zone)]

    def requests(self, request: SliceRequest) -> Sequence[Mapping[str, object]]:
        body = {"name": request.name, "labels": dict(request.labels)}
        return [
            {"method": "SSH", "url": f"ssh://{machine.address}:{machine.port}", "body": {"claim": body}}
            for machine in self._machines(request.zone)
        ]

    def _machines(self, zone: str) -> tuple[SshMachine, ...]:
        self._files[zone] = None
        return read_machines(Path(zone))

    def _claims(self, zone: str) -> Sequence[Mapping[str, object]]:
        machines = self._machines(zone)
        answers = self._run(machines, [self._script("show")] * len(machines))
        _require_success(machines, answers)
        return [_claim_in(answer.output) for answer in answers]

    def _claim(self, request: SliceRequest, machines: Sequence[SshMachine], index: int) -> str:
        metadata = dict(request.metadata)
        startup = metadata.pop("startup-script", "")
        key = metadata.pop("ssh-keys", "").partition(":")[2]
        claim = {
            "name": request.name,
            "labels": dict(request.labels),
            "metadata": metadata,
            "slice": request.slice,
            "created_at": self.now(),
        }
        # `forerun train --host auto` and the agent read these names, as on a TPU slice.
        hosts = ",".join(machine.internal for machine in machines)
        variables = f"TPU_WORKER_ID={index}\nTPU_WORKER_HOSTNAMES={hosts}" if len(machines) > 1 else ""
        text = f"name: {request.name}\n{json.dumps(claim)}"
        return self._script("claim", NAME=request.name, CLAIM=text, KEY=key, VARIABLES=variables, STARTUP=startup)

    def _script(self, action: str, **values: str) -> str:
        texts = {name: shlex.quote(values.get(name, "")) for name in ("NAME", "CLAIM", "KEY", "VARIABLES")}
        texts |= {"ACTION": action, "ROOT": shlex.quote(self._root), "STARTUP": values.get("STARTUP", "")}
        return _PLACE.sub(lambda found: texts[found[1]], SCRIPT.read_text(encoding="utf-8"))

    def _run(self, machines: Sequence[SshMachine], scripts: Sequence[str]) -> Sequence[SshAnswer]:
        def run(index: int) -> SshAnswer:
            machine = machines[index]
            host = HostAddress(index, machine.address, machine.internal, machine.port)
            access = HostAccess(host, known_keys(machine), self._identity, user="root")

            def write(stream: IO[bytes]) -> None:
                stream.write(scripts[index].encode())

            answer = run_on(access, COMMAND, write, limit_seconds=700)
            require_same_host(access, answer)
            return answer

        with ThreadPoolExecutor(min(PARALLEL, len(machines))) as pool:
            return list(pool.map(run, range(len(machines))))


def _require_success(machines: Sequence[SshMachine], answers: Sequence[SshAnswer]) -> None:
    for machine, answer in zip(machines, answers, strict=True):
        if answer.trouble is Trouble.UNREACHABLE:
            raise CloudUnavailable(f"{machine.address} does not answer to ssh: {answer.errors}")
        if answer.exit_code != 0:
            raise UserError(
                "E-CLOUD-039",
                f"forerun cannot use the machine {machine.address}",
                why=answer.errors or f"exit code {answer.exit_code}",
                fix=f"log in with `ssh -p {machine.port} {machine.address}`; its user must be root, or may use sudo "
                "without a password",
            )


def _claim_in(output: str) -> Mapping[str, object]:
    lines = output.splitlines()
    return json.loads(lines[1]) if len(lines) > 1 else {}


def _has(answer: SshAnswer, name: str) -> bool:
    return _claim_in(answer.output).get("name") == name


def _texts(value: object) -> Mapping[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}
