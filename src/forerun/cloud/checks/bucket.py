"""Checks of the bucket: its place against that of the slice, and the permissions on it."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed, region_of
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest

PERMISSIONS = (
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
    answer = rest.call("GET", "storage", f"{path}/iam/testPermissions", params={"permissions": PERMISSIONS})
    allowed = set(answer.get("permissions") or ())
    missing = [name for name in PERMISSIONS if name not in allowed]
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
