"""Errors of Google's APIs, and what they mean for the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud.provider import CloudUnavailable, Failure, RequestRefused
from forerun.errors import UserError

# Canonical codes (google.rpc.Code) that operations and answers contain.
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = 3, 4, 5, 6, 7
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNAVAILABLE, UNAUTHENTICATED = 8, 9, 14, 16
_CODES: Mapping[str, int] = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
_CODES_BY_STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 412: 9, 429: 8, 500: 13, 501: 12, 503: 14, 504: 4}

# Code 8 and status 429 mean three things: too many requests, no machines, or no quota. Only the text tells which.
# The reason RATE_LIMIT_EXCEEDED does not tell: Google uses it for the number of chips too.
_RATE = ("per minute", "perminute", "per 100 seconds", "ratelimitexceeded", "too many requests")
_CAPACITY = (
    "capacity",
    "zone_resource_pool_exhausted",
    "does not have enough resources",
    "resource pool exhausted",
    "stockout",
    "no more resources",
    "resources are not available",
    "unsatisfiable",
)
_QUOTA = ("quota", "limit exceeded", "per project", "perproject", "limit_exceeded")


class ApiError(Exception):
    """An error that an API returned, in its answer or inside a finished operation.

    Attributes:
      status: the HTTP status; 0 for an error inside an operation.
      code: the canonical code (google.rpc.Code); 0 if it is unknown.
      reason: the API's own word, such as `SERVICE_DISABLED` or `ZONE_RESOURCE_POOL_EXHAUSTED`.
    """

    def __init__(self, status: int, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def is_absent(self) -> bool:
        return self.status == 404 or self.code == NOT_FOUND

    @property
    def is_duplicate(self) -> bool:
        """Return whether the resource exists already. Status 409 alone has other meanings too."""
        return self.code == ALREADY_EXISTS or self.reason.lower() in ("alreadyexists", "resource_already_exists")


def error_of(status: int, answer: object) -> ApiError:
    """Return the error in the body of an answer, in the form of either API."""
    found = answer.get("error") if isinstance(answer, Mapping) else None
    if not isinstance(found, Mapping):
        text = str(found or answer or f"HTTP status {status}")
        return ApiError(status, _CODES_BY_STATUS.get(status, 0), "", text[:500])
    name = str(found.get("status") or "")
    code = _CODES.get(name, _CODES_BY_STATUS.get(status, 0))
    return ApiError(status, code, _reason(found) or name, str(found.get("message") or f"HTTP status {status}"))


def operation_error(found: Mapping[str, Any]) -> ApiError:
    """Return the error of a finished operation: `{code, message}`, or Compute Engine's list `{errors: [...]}`."""
    errors = found.get("errors")
    if not errors:
        return ApiError(0, int(found.get("code") or 0), _reason(found), str(found.get("message") or "unknown error"))
    reason = str(errors[0].get("code") or "")
    message = "; ".join(str(one.get("message") or one.get("code")) for one in errors)
    codes = {"RESOURCE_NOT_FOUND": NOT_FOUND, "RESOURCE_ALREADY_EXISTS": ALREADY_EXISTS, "PERMISSIONS_ERROR": 7}
    return ApiError(0, codes.get(reason, 0), reason, message)


def classify(error: ApiError) -> Failure:
    """Return what an error means for the controller. Capacity and quota share a code and differ in their text."""
    text = f"{error.reason} {error.message}".lower()
    exhausted = error.code == RESOURCE_EXHAUSTED or error.status == 429
    # Compute Engine reports quota with status 403, and errors inside its operations have no canonical code.
    exceeded = "quota" in text and "exceeded" in text
    if exceeded or (exhausted and _contains(text, _QUOTA)):
        return Failure.QUOTA
    if exhausted or (error.code in (0, UNAVAILABLE) and _contains(text, _CAPACITY)):
        return Failure.CAPACITY
    if error.code == PERMISSION_DENIED or error.status in (401, 403):
        return Failure.PERMISSION
    # A name that does not exist inside a request, such as an unknown network, also makes the request invalid.
    if error.code in (INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION) or error.status in (400, 404):
        return Failure.INVALID
    return Failure.OTHER


def may_pass(error: ApiError) -> bool:
    """Return whether the same request may succeed within a minute: overload and rates, not capacity or quota."""
    text = f"{error.reason} {error.message}".lower()
    if error.status in (403, 429) and _contains(text, _RATE):
        return True
    if error.status in (408, 500, 502, 503, 504):
        return not _contains(text, _CAPACITY)
    return error.status == 429 and not _contains(text, _CAPACITY + _QUOTA)


def refusal(error: ApiError) -> RequestRefused:
    return RequestRefused(classify(error), error.message)


def _contains(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def _items(value: object) -> Sequence[object]:
    """Return a list from the body of a refusal, which may have any shape."""
    return value if isinstance(value, list) else ()


def _reason(found: Mapping[str, Any]) -> str:
    """Return the reason from the details (TPU API) or from the list of errors (Compute Engine)."""
    for detail in _items(found.get("details")):
        if isinstance(detail, Mapping) and detail.get("reason"):
            return str(detail["reason"])
    for error in _items(found.get("errors")):
        if isinstance(error, Mapping) and error.get("reason"):
            return str(error["reason"])
    return ""


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
