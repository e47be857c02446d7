"""The lease of a run: which controller acts. It saves requests; safety does not depend on it.

All actions are idempotent, and names of slices are a function of run and attempt. Two controllers that act at the same
time therefore repeat each other's requests, and never rent two slices for one attempt.
"""

from __future__ import annotations

import os
import secrets
import socket

from forerun.cloud.record.entries import LEASE_SECONDS, LeaseEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles


def holder_name() -> str:
    """Return a name for this process: readable, and different for each process."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """The lease of one controller."""

    def __init__(self, files: RunFiles, holder: str) -> None:
        self.files, self.holder = files, holder

    def take(self, now: float) -> LeaseEntry | None:
        """Take or renew the lease. Return None on success, else the lease of the controller that has it."""
        found = undamaged(self.files.lease())
        if found is not None and found.holder != self.holder and found.is_held(now):
            return found
        if found is None or found.holder != self.holder or not LEASE_SECONDS / 2 <= found.until - now <= LEASE_SECONDS:
            self.files.write_lease(LeaseEntry(self.holder, now + LEASE_SECONDS))
        return None

    def release(self, now: float) -> None:
        found = undamaged(self.files.lease())
        if found is not None and found.holder == self.holder:
            self.files.write_lease(LeaseEntry(self.holder, now))
