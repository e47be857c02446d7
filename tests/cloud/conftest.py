"""Fixtures of tests with real hosts."""

from __future__ import annotations

import os

import pytest
from hosts.namespaces import missing_for_hosts


@pytest.fixture(scope="session")
def real_hosts() -> None:
    """Skip where hosts cannot be namespaces. In CI, that is a failure."""
    missing = missing_for_hosts()
    if missing and os.environ.get("CI"):
        pytest.fail(f"hosts as namespaces do not work here: {missing}", pytrace=False)
    if missing:
        pytest.skip(f"hosts as namespaces do not work here: {missing}")
