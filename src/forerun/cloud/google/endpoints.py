"""Base addresses of Google's APIs, with the overrides that gcloud also reads from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# The value replaces the complete base address, as in gcloud: for Compute Engine it includes `compute/v1/`.
BASES: Mapping[str, str] = {
    "tpu": "https://tpu.googleapis.com/",
    "compute": "https://compute.googleapis.com/compute/v1/",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com/",
    "serviceusage": "https://serviceusage.googleapis.com/",
    "iam": "https://iam.googleapis.com/",
    "storage": "https://storage.googleapis.com/storage/v1/",
}
OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"


@dataclass(frozen=True)
class Endpoints:
    """The base address of each API by its name, and the names of those that the environment overrides."""

    bases: Mapping[str, str] = field(default_factory=lambda: dict(BASES))
    overridden: frozenset[str] = frozenset()

    def url(self, api: str, path: str) -> str:
        """Return the address of a path such as `v2/projects/p/locations`, which starts with no slash."""
        return self.bases[api] + path


def endpoints_from(environment: Mapping[str, str]) -> Endpoints:
    """Return the endpoints that the variables `CLOUDSDK_API_ENDPOINT_OVERRIDES_<API>` select."""
    overrides = {api: environment.get(OVERRIDE + api.upper(), "") for api in BASES}
    chosen = {api: base.rstrip("/") + "/" for api, base in overrides.items() if base}
    return Endpoints({**BASES, **chosen}, frozenset(chosen))
