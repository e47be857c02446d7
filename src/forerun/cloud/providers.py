"""The providers by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.google.credentials import google_session
from forerun.cloud.google.rest import Rest, endpoints_from
from forerun.cloud.provider import Provider
from forerun.cloud.ssh.ssh_provider import SshProvider
from forerun.cloud.tpu.tpu_provider import TpuProvider
from forerun.errors import UserError

TPU, COMPUTE, SSH = "tpu", "compute", "ssh"
GOOGLE = (TPU, COMPUTE)


def provider_named(name: str, project: str | None = None, environment: Mapping[str, str] | None = None) -> Provider:
    """Return a provider with the default credentials of the environment.

    Args:
      name: `tpu`, `compute`, or `ssh` for existing machines.
      project: the Google Cloud project; None: that of the environment or of the credentials.
    """
    if name == SSH:
        return SshProvider()
    if name not in GOOGLE:
        raise UserError(
            "E-CLOUD-017",
            f"there is no provider {name!r}",
            why=f"the providers of rented machines are {', '.join(GOOGLE)}",
            fix="an entry of the run's record may be from a newer version of forerun: update forerun",
        )
    rest = google_rest(project, environment, clock_api=name)
    return TpuProvider(rest) if name == TPU else ComputeProvider(rest)


def all_providers(project: str | None = None) -> Sequence[Provider]:
    """Return every provider that may have resources of a project."""
    return [provider_named(name, project) for name in GOOGLE]


def google_rest(
    project: str | None = None, environment: Mapping[str, str] | None = None, *, clock_api: str = TPU
) -> Rest:
    """Return the REST client of Google's APIs with the default credentials."""
    variables = os.environ if environment is None else environment
    endpoints = endpoints_from(variables)
    session, chosen = google_session(variables, endpoints, project)
    return Rest(chosen, session, endpoints, clock_api=clock_api)
