"""Failures of calls that do not end the control of a run."""

from __future__ import annotations

from forerun.cloud.provider import CloudUnavailable
from forerun.errors import UserError

# A refused call, a lost answer, an answer of the wrong shape, or a bucket that cannot be read. None of them is a reason
# to leave a slice alone.
FAILURES = (CloudUnavailable, UserError, OSError, ValueError, TypeError, LookupError, AttributeError)


def failure_text(error: Exception) -> str:
    """Return what failed and why, in one line."""
    if isinstance(error, UserError):
        return f"{error.what} [{error.code}]: {' '.join(error.why.split())}"
    if isinstance(error, CloudUnavailable | OSError):
        return " ".join(str(error).split()) or type(error).__name__
    return f"an answer has another form than expected: {type(error).__name__}: {error}"
