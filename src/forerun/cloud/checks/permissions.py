"""Checks of each permission of the account, and of the service account of the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import ApiDisabled

# Permissions by the role that contains them and that is the smallest predefined one.
TPU: Mapping[str, Sequence[str]] = {
    "roles/tpu.admin": (
        "tpu.nodes.create",
        "tpu.nodes.get",
        "tpu.nodes.list",
        "tpu.nodes.delete",
        "tpu.operations.get",
        "tpu.operations.list",
    ),
}
COMPUTE: Mapping[str, Sequence[str]] = {
    "roles/compute.instanceAdmin.v1": (
        "compute.instances.create",
        "compute.instances.get",
        "compute.instances.list",
        "compute.instances.delete",
        "compute.instances.setMetadata",
        "compute.instances.setLabels",
        "compute.instances.getGuestAttributes",
        "compute.disks.create",
        "compute.subnetworks.use",
        "compute.instanceGroupManagers.create",
        "compute.instanceGroupManagers.delete",
        "compute.instanceTemplates.create",
        "compute.instanceTemplates.delete",
        "compute.resourcePolicies.create",
        "compute.resourcePolicies.delete",
        "compute.zoneOperations.get",
    ),
}
USE_ACCOUNT: Mapping[str, Sequence[str]] = {"roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs",)}
# Without these, only checks and messages are less precise.
OPTIONAL: Mapping[str, Sequence[str]] = {
    "roles/serviceusage.serviceUsageViewer": ("serviceusage.services.get", "serviceusage.quotas.get"),
    "roles/compute.networkViewer": ("compute.firewalls.list",),
}
# Roles of the hosts: they write to the bucket, and delete their own slice at the deadline.
HOST_ROLES: Mapping[str, Sequence[str]] = {
    "tpu": ("roles/tpu.admin", "roles/storage.objectAdmin"),
    "compute": ("roles/compute.instanceAdmin.v1", "roles/storage.objectAdmin"),
}
BROAD_ROLES = ("roles/editor", "roles/owner")


def check_permissions(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Yield one finding for each permission that is missing, or one for all if none is."""
    required = {**(TPU if need.provider == "tpu" else COMPUTE), **USE_ACCOUNT}
    wanted = [name for names in (*required.values(), *OPTIONAL.values()) for name in names]
    path = f"v1/projects/{rest.project}:testIamPermissions"
    try:
        answer = rest.call("POST", "cloudresourcemanager", path, {"permissions": wanted})
    except ApiDisabled:
        enable = f"gcloud services enable cloudresourcemanager.googleapis.com --project {rest.project}"
        yield CloudFinding("permissions", "warn", "cannot be tested without the Resource Manager API", enable)
        return
    allowed = set(answer.get("permissions") or ())
    complete = True
    for roles, status in ((required, "FAIL"), (OPTIONAL, "warn")):
        for role, name in ((role, name) for role, names in roles.items() for name in names):
            if name not in allowed:
                complete = False
                grant = f"gcloud projects add-iam-policy-binding {rest.project} --member user:YOU --role {role}"
                yield CloudFinding("permission", "FAIL" if status == "FAIL" else "warn", f"{name} is missing", grant)
    if complete:
        yield CloudFinding("permissions", "ok", f"all {len(wanted)} that a run needs")


def check_host_account(rest: Rest, need: CloudNeed) -> CloudFinding:
    """Warn if the service account of the hosts lacks roles. Without them, no host can write to the bucket."""
    try:
        number = rest.call("GET", "cloudresourcemanager", f"v1/projects/{rest.project}").get("projectNumber")
        account = need.service_account or f"{number}-compute@developer.gserviceaccount.com"
        policy = rest.call("POST", "cloudresourcemanager", f"v1/projects/{rest.project}:getIamPolicy", {})
    except (ApiError, ApiDisabled):
        return CloudFinding(
            "host account",
            "warn",
            "the roles of the hosts' service account cannot be read",
            f"ask an owner of the project whether it has {' and '.join(HOST_ROLES[need.provider])}",
        )
    member = f"serviceAccount:{account}"
    roles = {str(one.get("role")) for one in policy.get("bindings") or () if member in (one.get("members") or ())}
    missing = [role for role in HOST_ROLES[need.provider] if role not in roles]
    if roles & set(BROAD_ROLES) or not missing:
        return CloudFinding("host account", "ok", f"{account} has {', '.join(sorted(roles))}")
    grants = [
        f"gcloud projects add-iam-policy-binding {rest.project} --member {member} --role {role}" for role in missing
    ]
    return CloudFinding("host account", "warn", f"{account} lacks {', '.join(missing)}", "; ".join(grants))
