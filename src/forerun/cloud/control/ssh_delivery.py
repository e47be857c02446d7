"""Delivery of a job to rented machines by ssh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cloud.provider import HostAddress
from forerun.cloud.record.entries import AttemptEntry, CloudRun
from forerun.hardware.tpu_hosts import HOSTS_VARIABLE
from forerun.reporter import Reporter

if TYPE_CHECKING:
    from forerun.cloud.setup.job_files import JobFiles

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
    ) -> None:
        self.job_folder, self.identity, self.project = job_folder, identity, project
        self.reporter, self.through_iap, self.local = reporter, through_iap, local
        self.secrets = secrets_in(os.environ) if secrets is None else secrets

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        from forerun.cloud.setup.startup import slice_metadata
        from forerun.cloud.ssh.keys import public_key

        return slice_metadata(run, attempt, public_key(self.identity), self.project)

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        from forerun.cloud.setup.bundle import make_bundle
        from forerun.cloud.ssh.connection import IapTunnel
        from forerun.cloud.ssh.delivery import deliver

        variables = dict(self.secrets)
        if len(hosts) > 1:  # machines without the metadata of a TPU slice find their index by their own address
            variables[HOSTS_VARIABLE] = ",".join(host.internal for host in hosts)
        bundle = make_bundle(
            run, attempt, self.job_folder, variables, project=self.project, local=self.local, ready_at=ready_at
        )
        tunnel = IapTunnel(self.project or "", attempt.option.zone) if self.through_iap else None
        deliver(bundle, hosts, host_keys, self.identity, self.reporter, tunnel=tunnel)

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        from forerun.cloud.ssh.connection import IapTunnel
        from forerun.cloud.ssh.delivery import setup_states

        tunnel = IapTunnel(self.project or "", zone) if self.through_iap else None
        for host, state in zip(hosts, setup_states(hosts, host_keys, self.identity, tunnel=tunnel), strict=True):
            word, _, reason = state.partition(" ")
            if word in SETUP_FAILURES:
                return f"host {host.index}: {reason}"
        return ""
