"""The checks of `forerun doctor --cloud`: account, project, permissions, quota, network, bucket and disk."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.cloud.compute.machine_types import is_machine_type, machine_shape
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import ApiDisabled, Capacity, CloudUnavailable
from forerun.cloud.providers import google_rest
from forerun.cloud.tpu.node_request import accelerator, location
from forerun.errors import UserError
from forerun.hardware.slices import CORES_PER_CHIP, NAMED_BY_CORES, Slice, slice_named
from forerun.storage.address import Address
from forerun.units import GIB, Bytes


@dataclass(frozen=True)
class CloudFinding:
    """The result of one check. `fix` is the command or edit that helps; empty if nothing is wrong."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class CloudNeed:
    """What is checked.

    Attributes:
      slice: the slice to rent, or an empty string: then quota is listed, not compared.
      zones: where it may be rented.
      provider: `tpu` or `compute`.
      bucket: the name of the bucket, or an empty string.
      data_bytes: the size of the job's local data.
      data_addresses: where the rest of the data is, such as `gs://bucket/text`.
      disk_gib: the size of the boot disk; None: the default of the image.
    """

    slice: str = ""
    zones: Sequence[str] = ()
    capacity: Capacity = "on-demand"
    provider: str = "tpu"
    hosts: int = 1
    bucket: str = ""
    has_job: bool = False
    data_bytes: int = 0
    data_addresses: Sequence[str] = ()
    disk_gib: int | None = None
    network: str = "default"
    service_account: str | None = None


def region_of(zone: str) -> str:
    return zone.rsplit("-", 1)[0]


# ---- account, project and APIs ----

REQUIRED_APIS = ("compute.googleapis.com", "storage.googleapis.com")
TPU_API = "tpu.googleapis.com"
TUNNEL_API = "iap.googleapis.com"


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
    required = (TPU_API, *REQUIRED_APIS) if need.provider == "tpu" else REQUIRED_APIS
    for service in (*required, TUNNEL_API):
        found = rest.call("GET", "serviceusage", f"v1/projects/{rest.project}/services/{service}")
        name = f"API {service.split('.')[0]}"
        if found.get("state") == "ENABLED":
            yield CloudFinding(name, "ok", "enabled")
        elif service == TUNNEL_API:
            yield CloudFinding(name, "ok", "not enabled; only --tunnel-through-iap needs it")
        else:
            fix = f"gcloud services enable {service} --project {rest.project}"
            yield CloudFinding(name, "FAIL", "not enabled", fix)


# ---- permissions ----

# Permissions by the role that contains them and that is the smallest predefined one.
TPU_ROLES: Mapping[str, Sequence[str]] = {
    "roles/tpu.admin": (
        "tpu.nodes.create",
        "tpu.nodes.get",
        "tpu.nodes.list",
        "tpu.nodes.delete",
        "tpu.operations.get",
        "tpu.operations.list",
    ),
}
COMPUTE_ROLES: Mapping[str, Sequence[str]] = {
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
ACCOUNT_ROLES: Mapping[str, Sequence[str]] = {"roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs",)}
# Without these, only checks and messages are less precise.
OPTIONAL_ROLES: Mapping[str, Sequence[str]] = {
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
    required = {**(TPU_ROLES if need.provider == "tpu" else COMPUTE_ROLES), **ACCOUNT_ROLES}
    wanted = [name for names in (*required.values(), *OPTIONAL_ROLES.values()) for name in names]
    path = f"v1/projects/{rest.project}:testIamPermissions"
    try:
        answer = rest.call("POST", "cloudresourcemanager", path, {"permissions": wanted})
    except ApiDisabled:
        enable = f"gcloud services enable cloudresourcemanager.googleapis.com --project {rest.project}"
        yield CloudFinding("permissions", "warn", "cannot be tested without the Resource Manager API", enable)
        return
    allowed = set(answer.get("permissions") or ())
    complete = True
    for roles, status in ((required, "FAIL"), (OPTIONAL_ROLES, "warn")):
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


# ---- bucket ----

BUCKET_PERMISSIONS = (
    "storage.objects.create",
    "storage.objects.get",
    "storage.objects.list",
    "storage.objects.delete",
)
CONTINENTS = {"US": ("us-", "northamerica-"), "EU": ("europe-",), "ASIA": ("asia-",)}


def check_bucket(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Fail if the bucket does not exist or cannot be written; warn if it is far from the slice."""
    if not need.bucket:
        if need.has_job:
            yield CloudFinding(
                "bucket",
                "FAIL",
                "the job stores its checkpoints on a local disk, which is deleted with the slice",
                "set checkpoint.folder to an address such as gs://my-bucket/runs",
            )
        return
    path = f"b/{need.bucket}"
    try:
        found = rest.call("GET", "storage", path)
    except ApiError as error:
        place = f" --location {region_of(need.zones[0])}" if need.zones else ""
        fix = f"gcloud storage buckets create gs://{need.bucket} --project {rest.project}{place}"
        yield CloudFinding("bucket", "FAIL", f"gs://{need.bucket}: {error.message}", fix)
        return
    answer = rest.call("GET", "storage", f"{path}/iam/testPermissions", params={"permissions": BUCKET_PERMISSIONS})
    allowed = set(answer.get("permissions") or ())
    missing = [name for name in BUCKET_PERMISSIONS if name not in allowed]
    if missing:
        fix = (
            f"gcloud storage buckets add-iam-policy-binding gs://{need.bucket} --member user:YOUR-ACCOUNT"
            " --role roles/storage.objectAdmin"
        )
        yield CloudFinding("bucket", "FAIL", f"gs://{need.bucket}: {', '.join(missing)} missing", fix)
    yield place_finding(need, str(found.get("location") or ""))


def place_finding(need: CloudNeed, location: str) -> CloudFinding:
    """Compare the place of the bucket with the regions of the zones. Traffic between regions is billed."""
    name, where = f"gs://{need.bucket}", location.upper()
    regions = list(dict.fromkeys(region_of(zone) for zone in need.zones))
    if not regions:
        return CloudFinding("bucket", "ok", f"{name} is in {where}")
    if where in CONTINENTS:
        far = [region for region in regions if not region.startswith(CONTINENTS[where])]
        if not far:
            return CloudFinding("bucket", "ok", f"{name} is in the multi-region {where}, as {', '.join(regions)}")
    else:
        far = [region for region in regions if region.upper() != where]
        if not far:
            return CloudFinding("bucket", "ok", f"{name} is in {where}, the region of the slice")
    fix = f"use a bucket in {far[0]}, or zones near {where}: --zones; traffic between regions is billed"
    return CloudFinding("bucket", "warn", f"{name} is in {where}, and the slice may be in {', '.join(far)}", fix)


# ---- network ----

ANYWHERE = "0.0.0.0/0"
TUNNEL_RANGE = "35.235.240.0/20"  # the addresses from which Identity-Aware Proxy connects
INTERNAL_RANGE = "10.128.0.0/9"  # of the subnetworks of the default network
SSH_PORT = 22
HOST_PORT = 8476  # one of the ports between hosts; the rule of the default network opens all


def check_network(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Fail if no rule lets ssh in, and warn if hosts of one slice cannot reach each other."""
    pages = rest.pages("compute", f"projects/{rest.project}/global/firewalls")
    rules = [rule for page in pages for rule in page.get("items") or ()]
    own = [rule for rule in rules if str(rule.get("network") or "").split("/")[-1] == need.network]
    outside, tunnel = (allowed_by(own, place, SSH_PORT) for place in (ANYWHERE, TUNNEL_RANGE))
    create = f"gcloud compute firewall-rules create forerun-ssh --project {rest.project} --network {need.network}"
    if outside:
        yield CloudFinding("ssh", "ok", f"the rule {outside} allows port 22 from everywhere")
    elif partly := _some_rule(own, SSH_PORT):
        found = f"the rule {partly} allows port 22 from some addresses only"
        yield CloudFinding("ssh", "warn", found, "check that your address is one of them, or --tunnel-through-iap")
    else:
        fix = f"{create} --allow tcp:22 --source-ranges YOUR-ADDRESS/32"
        yield CloudFinding("ssh", "FAIL", f"no rule of the network {need.network} allows port 22", fix)
    if tunnel:
        yield CloudFinding("IAP", "ok", f"the rule {tunnel} allows --tunnel-through-iap")
    else:
        fix = f"{create.replace('forerun-ssh', 'forerun-iap')} --allow tcp:22 --source-ranges {TUNNEL_RANGE}"
        yield CloudFinding("IAP", "warn", "no rule allows --tunnel-through-iap", fix)
    if need.hosts > 1:
        inside = allowed_by(own, INTERNAL_RANGE, HOST_PORT)
        if inside:
            yield CloudFinding("hosts", "ok", f"the rule {inside} lets hosts of a slice reach each other")
        else:
            fix = f"{create.replace('forerun-ssh', 'forerun-internal')} --allow tcp,udp,icmp --source-ranges RANGE"
            found = f"no rule lets the {need.hosts} hosts reach each other in {INTERNAL_RANGE}"
            yield CloudFinding("hosts", "warn", found, f"{fix}, with the range of the subnetwork")


def allowed_by(rules: Sequence[Mapping[str, Any]], source: str, port: int) -> str | None:
    """Return the rule that allows TCP to `port` from all addresses of `source`, or None.

    Rules with a lower priority number win, and of equal ones those that deny. Rules for certain machines only (tags,
    service accounts) are ignored: rented hosts have no tags.
    """
    wanted = ipaddress.ip_network(source)
    ordered = sorted(rules, key=lambda rule: (int(rule.get("priority") or 1000), "allowed" in rule))
    for rule in ordered:
        if not _is_general(rule):
            continue
        ranges = [ipaddress.ip_network(one, strict=False) for one in rule.get("sourceRanges") or (ANYWHERE,)]
        same = [one for one in ranges if one.version == wanted.version]
        if "denied" in rule:
            if any(one.overlaps(wanted) for one in same) and _has_port(rule["denied"], port):
                return None
        elif any(wanted.subnet_of(one) for one in same) and _has_port(rule.get("allowed") or (), port):  # type: ignore[arg-type]
            return str(rule.get("name"))
    return None


def _some_rule(rules: Sequence[Mapping[str, Any]], port: int) -> str | None:
    for rule in rules:
        if _is_general(rule) and _has_port(rule.get("allowed") or (), port):
            return str(rule.get("name"))
    return None


def _is_general(rule: Mapping[str, Any]) -> bool:
    if rule.get("direction", "INGRESS") != "INGRESS" or rule.get("disabled"):
        return False
    return not (rule.get("targetTags") or rule.get("targetServiceAccounts") or rule.get("sourceTags"))


def _has_port(entries: Sequence[Mapping[str, Any]], port: int) -> bool:
    for entry in entries:
        if str(entry.get("IPProtocol")).lower() not in ("tcp", "all", "6"):
            continue
        ports = entry.get("ports")
        if not ports:
            return True
        for text in ports:
            first, _, last = str(text).partition("-")
            if int(first) <= port <= int(last or first):
                return True
    return False


# ---- boot disk ----

DEFAULT_GIB = 100  # of the images of the Cloud TPU API
SYSTEM_GIB = 30  # an estimate: the image, Python and its packages, and the compile cache
COPIES = 2  # the data itself, and the tokens that are made of it


def check_boot_disk(rest: Rest, need: CloudNeed) -> CloudFinding:
    """Warn if the data may fill the disk. The sizes of downloads from a hub are not known here."""
    size = need.disk_gib or DEFAULT_GIB
    data_bytes = COPIES * (need.data_bytes + sum(bytes_at(rest, address) for address in need.data_addresses))
    needed = SYSTEM_GIB + data_bytes / GIB
    found = f"{size} GiB; the system needs about {SYSTEM_GIB} GiB, and the data at most {Bytes(data_bytes)}"
    if needed <= size:
        return CloudFinding("boot disk", "ok", found)
    return CloudFinding("boot disk", "warn", found, f"forerun run ... --disk-gib {math.ceil(needed / 50) * 50}")


def bytes_at(rest: Rest, address: str) -> int:
    """Return the size of all objects below an address such as `gs://bucket/text/*.jsonl`."""
    parsed = Address.of(address)
    prefix = re.split(r"[*?\[{]", parsed.prefix, maxsplit=1)[0]
    pages = rest.pages("storage", f"b/{parsed.bucket}/o", {"prefix": prefix, "fields": "items(size),nextPageToken"})
    return sum(int(one.get("size") or 0) for page in pages for one in page.get("items") or ())


# ---- quota ----

# How the names of limits contain the generation: TPUV6EPreemptiblePerProjectPerRegionForTPUAPI.
_GENERATIONS = {
    "v2": r"tpuv2",
    "v3": r"tpuv3",
    "v4": r"tpuv4",
    "v5e": r"tpuv5s?lite",
    "v5p": r"tpuv5p(?!re)",
    "v6e": r"tpuv6e",
}
_GPU_QUOTA = {"A100-40": "A100", "A100-80": "A100_80GB", "H100": "H100", "L4": "L4"}
SERVING_CHIPS = (1, 4, 8)  # v5e slices of these sizes use the quota for serving
UNLIMITED = -1
REQUEST_PAGE = "https://console.cloud.google.com/iam-admin/quotas"


@dataclass(frozen=True)
class QuotaLimit:
    """A limit of the TPU API: how many chips or cores, by zone or region; the empty place is the default."""

    name: str
    by_place: Mapping[str, int]

    def at(self, zone: str) -> int | None:
        for place in (zone, region_of(zone), ""):
            if place in self.by_place:
                return self.by_place[place]
        return None


def quota_limits(metrics: Iterable[Mapping[str, Any]]) -> list[QuotaLimit]:
    """Return the limits in the `consumerQuotaMetrics` of the Service Usage API."""
    found = []
    for metric in metrics:
        for limit in metric.get("consumerQuotaLimits") or ():
            places: dict[str, int] = {}
            for bucket in limit.get("quotaBuckets") or ():
                dimensions = bucket.get("dimensions") or {}
                place = str(dimensions.get("zone") or dimensions.get("region") or "")
                places[place] = int(bucket.get("effectiveLimit") or 0)
            found.append(QuotaLimit(f"{metric.get('metric')} {limit.get('name')} {metric.get('displayName')}", places))
    return found


def fitting_limits(limits: Sequence[QuotaLimit], wanted: Slice, *, preemptible: bool) -> list[QuotaLimit]:
    """Return the limits that hold for a slice. All of them must allow it."""
    generation = wanted.chip.name
    chosen = []
    for limit in limits:
        name = re.sub(r"[^a-z0-9]", "", limit.name.lower())
        if generation not in _GENERATIONS or not re.search(_GENERATIONS[generation], name):
            continue
        if ("preemptible" in name) != preemptible:
            continue
        if generation in ("v2", "v3") and ("pod" in name) != (wanted.hosts > 1):
            continue
        if generation == "v5e" and ("serving" in name) != (wanted.chips in SERVING_CHIPS):
            continue
        chosen.append(limit)
    return chosen


def check_quota(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Yield one finding for each zone: whether it offers the slice, and whether the quota is enough."""
    if is_machine_type(need.slice):
        yield from _gpu_quota(rest, need)
        return
    wanted = slice_named(need.slice)
    if wanted.chip.name not in _GENERATIONS:
        yield CloudFinding(
            "quota",
            "warn",
            f"{wanted.name}: its quota is in Compute Engine and cannot be read here",
            f"look for TPUS_PER_TPU_FAMILY: {REQUEST_PAGE}?project={rest.project}",
        )
        return
    # Flex-start uses the preemptible quota too.
    preemptible = need.capacity in ("spot", "flex-start")
    path = f"v1beta1/projects/{rest.project}/services/tpu.googleapis.com/consumerQuotaMetrics"
    limits: list[QuotaLimit] | None = None
    try:
        pages = rest.pages("serviceusage", path, {"view": "FULL"})
        limits = quota_limits(metric for page in pages for metric in page.get("metrics") or ())
    except (ApiError, CloudUnavailable) as error:
        yield CloudFinding(
            "quota", "warn", f"cannot be read: {error}", f"look at {REQUEST_PAGE}?project={rest.project}"
        )
    fitting = fitting_limits(limits or (), wanted, preemptible=preemptible)
    good = False
    findings = []
    for zone in need.zones:
        finding = _zone_finding(rest, wanted, zone, fitting, known=limits is not None)
        good = good or finding.status != "FAIL"
        findings.append(finding)
    for finding in findings:
        # One zone is enough: a zone that does not work is no failure if another one does.
        yield (
            CloudFinding(finding.name, "warn", finding.found, finding.fix)
            if good and finding.status == "FAIL"
            else finding
        )


def _zone_finding(rest: Rest, wanted: Slice, zone: str, fitting: Sequence[QuotaLimit], *, known: bool) -> CloudFinding:
    name = f"zone {zone}"
    if not _is_offered(rest, wanted, zone):
        return CloudFinding(name, "FAIL", f"does not offer {wanted.name}", "choose another zone: --zones")
    at_zone = [limit for one in fitting if (limit := one.at(zone)) is not None and limit != UNLIMITED]
    if not known or (not at_zone and not fitting):
        return CloudFinding(name, "ok", f"offers {wanted.name}; its quota is not known")
    if not at_zone:
        return CloudFinding(name, "ok", f"offers {wanted.name}; its quota has no limit")
    limit, chips = min(at_zone), wanted.chips
    # Some limits count TensorCores: v2 and v3 always, v4 and v5p sometimes.
    cores = chips * CORES_PER_CHIP[wanted.chip.name] if wanted.chip.name in NAMED_BY_CORES else chips
    request = f"request more: {REQUEST_PAGE}?project={rest.project}"
    if limit < (cores if wanted.chip.name in ("v2", "v3") else chips):
        return CloudFinding(name, "FAIL", f"quota {limit}, and {wanted.name} needs {chips} chips", request)
    if limit < cores:
        found = f"quota {limit}: enough for the {chips} chips of {wanted.name}, but not if it counts its {cores} cores"
        return CloudFinding(name, "warn", found, request)
    return CloudFinding(name, "ok", f"offers {wanted.name}; quota {limit}, needs {chips} chips")


def _is_offered(rest: Rest, wanted: Slice, zone: str) -> bool:
    path = f"v2/{location(rest.project, zone)}/acceleratorTypes"
    api_name = accelerator(wanted.name, wanted.chip.name).get("acceleratorType")
    try:
        types = {str(one.get("type")) for page in rest.pages("tpu", path) for one in page.get("acceleratorTypes") or ()}
    except ApiError:
        return False
    return api_name in types if api_name else bool(types)


def _gpu_quota(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Compare the GPUs of a machine with the quota of each region."""
    machine = machine_shape(need.slice)
    kind = "H100_MEGA" if need.slice.startswith("a3-mega") else _GPU_QUOTA.get(machine.chip, "")
    preemptible = "PREEMPTIBLE_" if need.capacity in ("spot", "flex-start") else ""
    metric = f"{preemptible}NVIDIA_{kind}_GPUS"
    for region in dict.fromkeys(region_of(zone) for zone in need.zones):
        found = rest.call("GET", "compute", f"projects/{rest.project}/regions/{region}")
        limits = {str(one.get("metric")): one for one in found.get("quotas") or ()}
        name = f"region {region}"
        if metric not in limits:
            yield CloudFinding(name, "warn", f"has no quota {metric}", f"look at {REQUEST_PAGE}?project={rest.project}")
            continue
        free = float(limits[metric].get("limit") or 0) - float(limits[metric].get("usage") or 0)
        if free < machine.chips:
            text = f"{metric}: {free:.0f} free, {need.slice} needs {machine.chips}"
            yield CloudFinding(name, "FAIL", text, f"request more: {REQUEST_PAGE}?project={rest.project}")
        else:
            yield CloudFinding(name, "ok", f"{metric}: {free:.0f} free, needs {machine.chips}")


# ---- all checks, in the order in which problems are fixed ----


def cloud_checks(
    need: CloudNeed, project: str | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[CloudFinding]:
    """Yield the findings one by one. Nothing is created or changed.

    Args:
      project: the project; None: that of the environment or of the credentials.
    """
    try:
        rest = google_rest(project, environment)
    except UserError as error:
        yield _failure("credentials", error)
        return
    yield CloudFinding("credentials", "ok", rest.account or "found; they do not name an account")
    first = list(_guarded("project", lambda: [check_project(rest)]))
    yield from first
    if any(finding.status == "FAIL" for finding in first):
        return  # without the project, every other check fails for the same reason
    for name, check in _checks(rest, need):
        yield from _guarded(name, check)


def _checks(rest: Rest, need: CloudNeed) -> Iterator[tuple[str, Callable[[], Iterable[CloudFinding]]]]:
    yield "APIs", lambda: check_apis(rest, need)
    yield "permissions", lambda: check_permissions(rest, need)
    yield "host account", lambda: [check_host_account(rest, need)]
    if need.slice:
        yield "quota", lambda: check_quota(rest, need)
    yield "network", lambda: check_network(rest, need)
    yield "bucket", lambda: check_bucket(rest, need)
    if need.has_job:
        yield "boot disk", lambda: [check_boot_disk(rest, need)]


def _guarded(name: str, check: Callable[[], Iterable[CloudFinding]]) -> Iterator[CloudFinding]:
    """Yield the findings of a check. What it cannot read becomes a finding too, and the next checks run."""
    try:
        yield from check()
    except UserError as error:
        yield _failure(name, error)
    except (ApiError, CloudUnavailable) as error:
        yield CloudFinding(name, "warn", f"cannot be checked: {error}")


def _failure(name: str, error: UserError) -> CloudFinding:
    return CloudFinding(name, "FAIL", f"{error.what} ({error.why}) [{error.code}]", error.fix)
