"""Checks of the quota for a slice, and of the zones that offer it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed, region_of
from forerun.cloud.compute.machine_types import is_machine_type, machine_shape
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.tpu.node_request import accelerator, location
from forerun.hardware.slices import CORES_PER_CHIP, NAMED_BY_CORES, Slice, slice_named

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
