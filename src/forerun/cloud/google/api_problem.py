"""The exception that a provider raises for an error of an API that it did not expect."""

from __future__ import annotations

from forerun.cloud.google.api_error import ApiError, classify
from forerun.cloud.provider import CloudUnavailable, Failure
from forerun.errors import UserError


def problem(error: ApiError, project: str) -> Exception:
    """Return a UserError for a missing permission, else CloudUnavailable."""
    if classify(error) is Failure.PERMISSION:
        return UserError(
            "E-CLOUD-016",
            f"the account may not do this in the project {project}",
            why=error.message,
            fix="forerun doctor --cloud lists the permissions that are missing and the roles that contain them",
        )
    return CloudUnavailable(f"HTTP status {error.status}, {error.reason or 'no reason'}: {error.message}")
