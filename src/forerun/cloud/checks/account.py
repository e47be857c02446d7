"""Checks of the account, the project and its enabled APIs."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import ApiDisabled

REQUIRED = ("compute.googleapis.com", "storage.googleapis.com")
LEGACY = "tpu.googleapis.com"
TUNNEL = "iap.googleapis.com"


def check_project(rest: Rest) -> CloudFinding:
    """Fail if the project does not exist, is not active, or the account may not see it."""
    try:
        found = rest.call("GET", "cloudresourcemanager", f"v1/projects/{rest.project}")
    except ApiDisabled:
        enable = f"gcloud services enable cloudresourcemanager.googleapis.com --project {rest.project}"
        return CloudFinding("project", "warn", f"{rest.project}: its state cannot be read", enable)
    except ApiError as error:
        listing = "gcloud projects list shows the projects that this account can use"
        return CloudFinding("project", "FAIL", f"{rest.project}: {error.message}", listing)
    state = str(found.get("lifecycleState") or "ACTIVE")
    if state != "ACTIVE":
        return CloudFinding("project", "FAIL", f"{rest.project} is {state}", "choose another project: --project ID")
    return CloudFinding("project", "ok", f"{rest.project}, number {found.get('projectNumber', 'unknown')}")


def check_apis(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Fail for each API that a run needs and that is not enabled. Tunnels are optional."""
    required = (LEGACY, *REQUIRED) if need.provider == "tpu" else REQUIRED
    for service in (*required, TUNNEL):
        found = rest.call("GET", "serviceusage", f"v1/projects/{rest.project}/services/{service}")
        name = f"API {service.split('.')[0]}"
        if found.get("state") == "ENABLED":
            yield CloudFinding(name, "ok", "enabled")
        elif service == TUNNEL:
            yield CloudFinding(name, "ok", "not enabled; only --tunnel-through-iap needs it")
        else:
            fix = f"gcloud services enable {service} --project {rest.project}"
            yield CloudFinding(name, "FAIL", "not enabled", fix)
