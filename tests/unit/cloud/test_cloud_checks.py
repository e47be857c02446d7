"""All checks of a project against the fake of Google's APIs."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from fake import PROJECT, FakeCloud, Fault

from forerun.cloud.cloud_checks import (
    ANYWHERE,
    TUNNEL_RANGE,
    CloudNeed,
    QuotaLimit,
    allowed_by,
    check_boot_disk,
    cloud_checks,
    fitting_limits,
    place_finding,
    quota_limits,
)
from forerun.cloud.providers import google_rest
from forerun.hardware.slices import slice_named
from forerun.units import GIB

ZONE = "us-east5-b"
NEED = CloudNeed(slice="v6e-16", zones=(ZONE,), capacity="spot", hosts=4, bucket="mine", has_job=True)
QUOTA = "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI"
HOSTS = "serviceAccount:123456-compute@developer.gserviceaccount.com"
GOOD = {
    "denied_permissions": [],
    "disabled_services": [],
    "buckets": {"mine": "us-east5"},
    "quotas": {QUOTA: {ZONE: 16}},
    "bindings": [{"role": "roles/editor", "members": [HOSTS]}],
}


@pytest.fixture(scope="module")
def process() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        for name, ranges, ports in (("ssh", "0.0.0.0/0", ["22"]), ("inside", "10.128.0.0/9", ["0-65535"])):
            rule = {
                "name": f"default-allow-{name}",
                "network": f"projects/{PROJECT}/global/networks/default",
                "direction": "INGRESS",
                "priority": 65534,
                "sourceRanges": [ranges],
                "allowed": [{"IPProtocol": "tcp", "ports": ports}],
            }
            request = urllib.request.Request(
                f"{cloud.url}/compute/v1/projects/{PROJECT}/global/firewalls",
                json.dumps(rule).encode(),
                {"Content-Type": "application/json"},
                method="POST",
            )
            with urllib.request.urlopen(request) as answer:
                answer.read()
        yield cloud


@pytest.fixture
def cloud(process: FakeCloud) -> Iterator[FakeCloud]:
    process.set(**GOOD, region_quotas={})
    yield process
    process.clear_faults()


def findings(cloud: FakeCloud, need: CloudNeed = NEED) -> list[tuple[str, str]]:
    """Return what is wrong, as (status, name)."""
    return [(one.status, one.name) for one in cloud_checks(need, None, cloud.environment()) if one.status != "ok"]


def test_a_good_project_has_no_finding_and_nothing_is_created(cloud: FakeCloud) -> None:
    before = cloud.resources()
    found = list(cloud_checks(NEED, None, cloud.environment()))
    assert [one.name for one in found if one.status != "ok"] == []
    names = {one.name for one in found}
    assert {"credentials", "project", "API tpu", "permissions", "ssh", "IAP", "bucket", "boot disk"} <= names
    assert f"zone {ZONE}" in names
    assert cloud.resources() == before


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"disabled_services": ["tpu.googleapis.com"]}, [("FAIL", "API tpu")]),
        ({"disabled_services": ["iap.googleapis.com"]}, []),
        ({"denied_permissions": ["tpu.nodes.create"]}, [("FAIL", "permission")]),
        ({"denied_permissions": ["tpu.nodes.create", "iam.serviceAccounts.actAs"]}, [("FAIL", "permission")] * 2),
        ({"denied_permissions": ["serviceusage.quotas.get"]}, [("warn", "permission")]),
        ({"denied_permissions": ["storage.objects.create"]}, [("FAIL", "bucket")]),
        ({"bindings": []}, [("warn", "host account")]),
        ({"bindings": [{"role": "roles/tpu.admin", "members": [HOSTS]}]}, [("warn", "host account")]),
        ({"quotas": {QUOTA: {ZONE: 8}}}, [("FAIL", f"zone {ZONE}")]),
        ({"quotas": {QUOTA: {ZONE: 16}, QUOTA.replace("Zone", "Region"): {"us-east5": 0}}}, [("FAIL", f"zone {ZONE}")]),
        ({"quotas": {}}, []),
        ({"buckets": {}}, [("FAIL", "bucket")]),
        ({"buckets": {"mine": "europe-west4"}}, [("warn", "bucket")]),
        ({"buckets": {"mine": "us"}}, []),
    ],
)
def test_each_problem_has_its_finding(cloud: FakeCloud, settings: Any, wrong: list[tuple[str, str]]) -> None:
    cloud.set(**settings)
    assert findings(cloud) == wrong


def test_one_zone_with_quota_is_enough(cloud: FakeCloud) -> None:
    need = dataclasses.replace(NEED, zones=("us-east1-d", ZONE, "us-west1-z"))
    cloud.set(quotas={QUOTA: {ZONE: 16, "us-east1-d": 0}}, buckets={"mine": "us"})
    assert findings(cloud, need) == [("warn", "zone us-east1-d"), ("warn", "zone us-west1-z")]


def test_a_gpu_machine_has_the_quota_of_its_region(cloud: FakeCloud) -> None:
    need = dataclasses.replace(
        NEED, slice="a3-highgpu-8g", zones=("us-east5-a",), capacity="on-demand", provider="compute", hosts=1
    )
    assert findings(cloud, need) == []
    cloud.set(region_quotas={"us-east5": {"NVIDIA_H100_GPUS": 4.0}})
    assert ("FAIL", "region us-east5") in findings(cloud, need)


def test_without_a_slice_or_a_job_only_the_project_is_checked(cloud: FakeCloud) -> None:
    cloud.set(quotas={}, buckets={})
    assert findings(cloud, CloudNeed()) == []


def test_a_job_without_a_bucket_fails(cloud: FakeCloud) -> None:
    assert findings(cloud, dataclasses.replace(NEED, bucket="")) == [("FAIL", "bucket")]


def test_an_api_that_refuses_hides_no_other_check(cloud: FakeCloud) -> None:
    cloud.inject(Fault("error", method="GET", path="firewalls", http=403, message="denied", count=9))
    assert findings(cloud) == [("warn", "network")]


def test_without_credentials_one_finding_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    (found,) = cloud_checks(NEED, "p", {})
    assert (found.name, found.status) == ("credentials", "FAIL")
    assert "E-CLOUD-011" in found.found


@pytest.mark.parametrize(
    ("location", "zones", "status"),
    [
        ("US-EAST5", ("us-east5-a", "us-east5-b"), "ok"),
        ("US-EAST5", ("us-east5-a", "us-east1-d"), "warn"),
        ("EU", ("europe-west4-b",), "ok"),
        ("EU", ("us-east1-d",), "warn"),
        ("US", ("northamerica-northeast1-b",), "ok"),
        ("US", (), "ok"),
    ],
)
def test_the_bucket_is_near_the_slice(location: str, zones: tuple[str, ...], status: str) -> None:
    assert place_finding(dataclasses.replace(NEED, zones=zones), location).status == status


@pytest.mark.parametrize(
    ("data_gib", "disk_gib", "status"), [(0, None, "ok"), (35, None, "ok"), (36, None, "warn"), (36, 200, "ok")]
)
def test_the_disk_holds_the_data_twice(cloud: FakeCloud, data_gib: int, disk_gib: int | None, status: str) -> None:
    rest = google_rest(environment=cloud.environment())
    need = dataclasses.replace(NEED, data_bytes=data_gib * GIB, disk_gib=disk_gib)
    assert check_boot_disk(rest, need).status == status


def rule(name: str, **values: Any) -> dict[str, Any]:
    tcp = [{"IPProtocol": "tcp", "ports": ["22"]}]
    return {"name": name, "direction": "INGRESS", "priority": 1000, "sourceRanges": [ANYWHERE], "allowed": tcp} | values


def deny(name: str, **values: Any) -> dict[str, Any]:
    found = rule(name, **values)
    del found["allowed"]
    return found | {"denied": [{"IPProtocol": "all"}]}


@pytest.mark.parametrize(
    ("rules", "source", "port", "name"),
    [
        ([], ANYWHERE, 22, None),
        ([rule("ssh")], ANYWHERE, 22, "ssh"),
        ([rule("ssh")], TUNNEL_RANGE, 22, "ssh"),
        ([rule("ssh")], ANYWHERE, 23, None),
        ([rule("iap", sourceRanges=[TUNNEL_RANGE])], ANYWHERE, 22, None),
        ([rule("iap", sourceRanges=[TUNNEL_RANGE])], TUNNEL_RANGE, 22, "iap"),
        ([rule("range", allowed=[{"IPProtocol": "tcp", "ports": ["20-30"]}])], ANYWHERE, 22, "range"),
        ([rule("all", allowed=[{"IPProtocol": "all"}])], ANYWHERE, 8476, "all"),
        ([rule("udp", allowed=[{"IPProtocol": "udp"}])], ANYWHERE, 22, None),
        ([rule("off", disabled=True)], ANYWHERE, 22, None),
        ([rule("out", direction="EGRESS")], ANYWHERE, 22, None),
        ([rule("tagged", targetTags=["web"])], ANYWHERE, 22, None),
        ([rule("v6", sourceRanges=["::/0"])], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=900)], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=1000)], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=2000)], ANYWHERE, 22, "ssh"),
        ([rule("ssh"), deny("no", priority=900, sourceRanges=["10.0.0.0/8"])], TUNNEL_RANGE, 22, "ssh"),
    ],
)
def test_the_first_rule_that_matches_decides(rules: Any, source: str, port: int, name: str | None) -> None:
    assert allowed_by(rules, source, port) == name


NAMES = [
    "TPUV2sPerProjectPerZoneForTPUAPI",
    "TPUV2sPodPerProjectPerZoneForTPUAPI",
    "TPUV2sPodPerProjectPerRegionForTPUAPI",
    "TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI",
    "TPUV5PPerProjectPerZoneForTPUAPI",
    "TPUV5PPreemptiblePerProjectPerZoneForTPUAPI",
    "tpu-v5s-litepod",
    "tpu-v5s-litepod-serving",
    "tpu-v5s-litepod-serving-preemptible",
    "TPUV6EPerProjectPerZoneForTPUAPI",
    "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI",
    "CreateNodeRequestsPerMinutePerProject",
]


@pytest.mark.parametrize(
    ("slice", "preemptible", "names"),
    [
        ("v2-8", False, [NAMES[0]]),
        ("v2-32", False, NAMES[1:3]),
        ("v4-16", True, [NAMES[3]]),
        ("v5p-8", False, [NAMES[4]]),
        ("v5p-8", True, [NAMES[5]]),
        ("v5e-16", False, [NAMES[6]]),
        ("v5e-8", False, [NAMES[7]]),
        ("v5e-1", True, [NAMES[8]]),
        ("v6e-8", False, [NAMES[9]]),
        ("v6e-256", True, [NAMES[10]]),
        ("v3-8", False, []),
    ],
)
def test_a_slice_has_its_limits(slice: str, preemptible: bool, names: list[str]) -> None:
    limits = [QuotaLimit(name, {"": 1}) for name in NAMES]
    found = fitting_limits(limits, slice_named(slice), preemptible=preemptible)
    assert [limit.name for limit in found] == names


def test_the_limit_of_a_zone_is_before_that_of_its_region_and_the_default() -> None:
    (limit,) = quota_limits(
        [
            {
                "metric": "m",
                "consumerQuotaLimits": [
                    {
                        "name": "n",
                        "quotaBuckets": [
                            {"effectiveLimit": "0"},
                            {"effectiveLimit": "32", "dimensions": {"region": "us-east5"}},
                            {"effectiveLimit": "-1", "dimensions": {"zone": "us-east5-b"}},
                        ],
                    }
                ],
            }
        ]
    )
    assert [limit.at(zone) for zone in ("us-east5-b", "us-east5-a", "us-east1-d")] == [-1, 32, 0]
    assert QuotaLimit("x", {"us-east1-d": 8}).at("us-east5-b") is None
