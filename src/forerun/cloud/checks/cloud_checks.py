"""All checks of `forerun doctor --cloud`, in the order in which problems are fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from forerun.cloud.checks.account import check_apis, check_project
from forerun.cloud.checks.boot_disk import check_boot_disk
from forerun.cloud.checks.bucket import check_bucket
from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed
from forerun.cloud.checks.network import check_network
from forerun.cloud.checks.permissions import check_host_account, check_permissions
from forerun.cloud.checks.quota import check_quota
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.providers import google_rest
from forerun.errors import UserError


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
