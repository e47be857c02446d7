"""The delivery of a job to all hosts of a slice by ssh, and the state of their setup."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from forerun.cloud.provider import CloudUnavailable, HostAddress
from forerun.cloud.record.entries import AttemptEntry, CloudRun
from forerun.cloud.setup.bundle import Bundle, make_bundle
from forerun.cloud.setup.job_files import JobFiles
from forerun.cloud.setup.startup import slice_metadata
from forerun.cloud.ssh.connection import HostAccess, IapTunnel, SshAnswer, Trouble, run_on
from forerun.cloud.ssh.keys import public_key
from forerun.errors import UserError
from forerun.hardware.tpu_hosts import HOSTS_VARIABLE
from forerun.reporter import Reporter

STATE_FOLDER = "/var/lib/forerun"
PARALLEL = 32  # connections at the same time: gcloud's own documentation warns of more than 100
LIMIT_SECONDS = 60.0
RETRY_SECONDS = 2.0
_NOT_READY, _DAMAGED = 77, 78  # exit codes of the command below


def host_accesses(
    hosts: Sequence[HostAddress],
    host_keys: Sequence[Sequence[str]],
    identity: Path | None,
    tunnel: IapTunnel | None,
) -> list[HostAccess]:
    """Return how to reach each host. `host_keys` has the keys of each host, in the order of `hosts`."""
    if len(host_keys) < len(hosts):
        raise CloudUnavailable(f"ssh host keys of {len(host_keys)} of {len(hosts)} hosts are known")
    return [
        HostAccess(host, tuple(keys), identity, tunnel=tunnel) for host, keys in zip(hosts, host_keys, strict=False)
    ]


def deliver(
    bundle: Bundle,
    hosts: Sequence[HostAddress],
    host_keys: Sequence[Sequence[str]],
    identity: Path | None,
    reporter: Reporter,
    *,
    tunnel: IapTunnel | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    folder: str = STATE_FOLDER,
) -> None:
    """Send a bundle to all hosts, in parallel. A host that has accepted a bundle keeps it.

    Hosts that are not ready are tried again until `limit_seconds` have passed.

    Args:
      reporter: receives one line for each change.
      folder: the folder of forerun on the hosts.

    Raises:
      UserError: a host proves another key than its pinned one, or no key of it is known. Nothing is sent to it.
      CloudUnavailable: a host cannot be reached yet. The next call continues with it.
    """
    waiting = host_accesses(hosts, host_keys, identity, tunnel)
    command = delivery_command(folder, bundle.sha256)
    until = now() + limit_seconds
    told = ""
    with ThreadPoolExecutor(min(PARALLEL, max(1, len(waiting)))) as pool:
        while True:
            answers = list(pool.map(lambda access: run_on(access, command, bundle.write), waiting))
            failures = [pair for pair in zip(waiting, answers, strict=True) if pair[1].exit_code != 0]
            for access, answer in failures:
                require_same_host(access, answer)
            for access, answer in zip(waiting, answers, strict=True):
                if answer.exit_code == 0:
                    reporter.info(f"host {access.host.index}: {answer.output.strip()}")
            if not failures:
                return
            reason = _reason(failures)
            if reason != told:
                reporter.info(reason)
            told = reason
            if now() >= until:
                raise CloudUnavailable(reason)
            sleep(RETRY_SECONDS)
            waiting = [access for access, _ in failures]


def setup_states(
    hosts: Sequence[HostAddress],
    host_keys: Sequence[Sequence[str]],
    identity: Path | None,
    *,
    tunnel: IapTunnel | None = None,
    folder: str = STATE_FOLDER,
) -> list[str]:
    """Return the line that the startup script of each host wrote last, or an empty text for an unreachable host.

    The first word is the phase: preparing, waiting, installing, checking, starting, started, failed or broken.
    """
    accesses = host_accesses(hosts, host_keys, identity, tunnel)
    with ThreadPoolExecutor(min(PARALLEL, max(1, len(accesses)))) as pool:
        answers = list(pool.map(lambda access: run_on(access, f"cat {folder}/state", limit_seconds=60), accesses))
    return [answer.output.strip() if answer.exit_code == 0 else "" for answer in answers]


def delivery_command(folder: str, digest: str) -> str:
    """Return the shell command that stores its standard input as the bundle, complete or not at all."""
    return f"""set -eu
umask 077
if [ -f {folder}/accepted ]; then echo "has the job"; exit 0; fi
[ -w {folder}/inbox ] || exit {_NOT_READY}
part={folder}/inbox/.part.$$
trap 'rm -f "$part"' EXIT
cat >"$part"
echo "{digest}  $part" | sha256sum --check --status || exit {_DAMAGED}
mv -f "$part" {folder}/inbox/bundle.tar
echo "the job was delivered"
"""


def require_same_host(access: HostAccess, answer: SshAnswer) -> None:
    """Raise UserError if a host proved another key than its pinned one."""
    if answer.trouble is Trouble.CHANGED_HOST_KEY:
        raise UserError(
            "E-CLOUD-037",
            f"host {access.host.index} at {access.host.address} has another ssh host key than recorded",
            why="another machine may answer at its address, so the job and its secrets were not sent",
            fix="delete the slice with `forerun down NAME`, then start the run again",
        )


def _reason(failures: Sequence[tuple[HostAccess, SshAnswer]]) -> str:
    """Return why the first host has no bundle, and how many others have none."""
    access, answer = failures[0]
    if answer.trouble is Trouble.REFUSED_KEY:
        detail = "does not accept the run's ssh key yet"
    elif answer.trouble is not None:
        detail = "does not answer to ssh yet"
    elif answer.exit_code == _NOT_READY:
        detail = "has not started its setup yet"
    elif answer.exit_code == _DAMAGED:
        detail = "received a damaged bundle"
    else:
        detail = f"failed with exit code {answer.exit_code}: {answer.errors[-200:]}"
    others = f" (and {len(failures) - 1} other hosts)" if len(failures) > 1 else ""
    return f"host {access.host.index} at {access.host.address} {detail}{others}"


# Variables of the user's environment that the hosts get. They travel by ssh, and are in no other place.
SECRET_VARIABLES = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_ENTITY",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


SETUP_FAILURES = ("failed", "broken")  # words of the startup script


def secrets_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the hosts get."""
    return {name: environment[name] for name in SECRET_VARIABLES if environment.get(name)}


class SshDelivery:
    """Sends the bundle of a job with the run's own ssh key.

    Args:
      job_folder: what paths in the job file are relative to.
      identity: the run's private key file.
      through_iap: connect through Identity-Aware Proxy.
      local: the local files of the job that the user has agreed to send; None: list them at each delivery.
      overrides: keys of the job whose local files have other paths on this machine than on the user's.
    """

    def __init__(
        self,
        job_folder: Path,
        identity: Path,
        project: str | None,
        reporter: Reporter,
        secrets: Mapping[str, str] | None = None,
        through_iap: bool = False,
        local: JobFiles | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.job_folder, self.identity, self.project = job_folder, identity, project
        self.overrides = tuple(overrides)
        self.reporter, self.through_iap, self.local = reporter, through_iap, local
        self.secrets = secrets_in(os.environ) if secrets is None else secrets

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return slice_metadata(run, attempt, public_key(self.identity), self.project)

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        variables = dict(self.secrets)
        if len(hosts) > 1:  # machines without the metadata of a TPU slice find their index by their own address
            variables[HOSTS_VARIABLE] = ",".join(host.internal for host in hosts)
        moved = replace(run, arguments=(*run.arguments, *self.overrides))
        bundle = make_bundle(
            moved, attempt, self.job_folder, variables, project=self.project, local=self.local, ready_at=ready_at
        )
        tunnel = IapTunnel(self.project or "", attempt.option.zone) if self.through_iap else None
        deliver(bundle, hosts, host_keys, self.identity, self.reporter, tunnel=tunnel)

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        tunnel = IapTunnel(self.project or "", zone) if self.through_iap else None
        for host, state in zip(hosts, setup_states(hosts, host_keys, self.identity, tunnel=tunnel), strict=True):
            word, _, reason = state.partition(" ")
            if word in SETUP_FAILURES:
                return f"host {host.index}: {reason}"
        return ""
