"""Errors of Google's APIs: texts as the APIs send them, and what they mean."""

import pytest

from forerun.cloud.google.api_error import ApiError, classify, error_of, operation_error, problem
from forerun.cloud.provider import CloudUnavailable, Failure
from forerun.errors import UserError

NO_CAPACITY = (
    'There is no more capacity in the zone "us-central2-b"; you can try in another zone where Cloud TPU Nodes are '
    "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1b2c3d]"
)
QUOTA = "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east1."


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (operation_error({"code": 8, "message": NO_CAPACITY}), Failure.CAPACITY),
        (operation_error({"code": 8, "message": "Insufficient reserved capacity"}), Failure.CAPACITY),
        (operation_error({"code": 8, "message": "RESOURCE_EXHAUSTED"}), Failure.CAPACITY),
        (ApiError(429, 8, "RATE_LIMIT_EXCEEDED", QUOTA), Failure.QUOTA),
        (operation_error({"code": 8, "message": QUOTA}), Failure.QUOTA),
        (
            operation_error(
                {"errors": [{"code": "QUOTA_EXCEEDED", "message": "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0"}]}
            ),
            Failure.QUOTA,
        ),
        (
            operation_error(
                {
                    "errors": [
                        {
                            "code": "ZONE_RESOURCE_POOL_EXHAUSTED",
                            "message": "The zone 'z' does not have enough resources available to fulfill the request.",
                        }
                    ]
                }
            ),
            Failure.CAPACITY,
        ),
        (ApiError(403, 7, "quotaExceeded", "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."), Failure.QUOTA),
        (ApiError(403, 7, "forbidden", "Required 'compute.instances.create' permission for 'p'"), Failure.PERMISSION),
        (ApiError(403, 7, "", "Permission denied on 'locations/x' (or it may not exist)."), Failure.PERMISSION),
        (ApiError(403, 7, "", "requires a quota project, which is not set by default"), Failure.PERMISSION),
        (ApiError(400, 3, "", "invalid AcceleratorType: v9. Valid values are: v2-8"), Failure.INVALID),
        (ApiError(404, 5, "", "The network 'x' was not found"), Failure.INVALID),
        (operation_error({"code": 13, "message": "internal error"}), Failure.OTHER),
    ],
)
def test_an_error_has_one_meaning(error: ApiError, failure: Failure) -> None:
    assert classify(error) is failure


def test_both_forms_of_errors_are_read() -> None:
    tpu = error_of(
        409, {"error": {"code": 409, "status": "ALREADY_EXISTS", "message": "m", "details": [{"reason": "r"}]}}
    )
    assert (tpu.status, tpu.code, tpu.reason, tpu.message, tpu.is_duplicate) == (409, 6, "r", "m", True)
    compute = error_of(409, {"error": {"code": 409, "message": "m", "errors": [{"reason": "alreadyExists"}]}})
    assert compute.is_duplicate
    assert error_of(404, {}).is_absent
    assert error_of(502, "<html>bad gateway</html>").message == "<html>bad gateway</html>"
    assert operation_error({"errors": [{"code": "RESOURCE_NOT_FOUND", "message": "m"}]}).is_absent


def test_a_missing_permission_is_for_the_user() -> None:
    found = problem(ApiError(403, 7, "", "The caller does not have permission"), "p")
    assert isinstance(found, UserError)
    assert found.code == "E-CLOUD-016"
    assert isinstance(problem(ApiError(400, 3, "", "odd"), "p"), CloudUnavailable)
