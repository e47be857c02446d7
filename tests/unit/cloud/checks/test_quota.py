"""Quota of TPU slices: which limits hold, by the names that Google's messages contain."""

import pytest

from forerun.cloud.cloud_checks import QuotaLimit, fitting_limits, quota_limits
from forerun.hardware.slices import slice_named

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
