"""The work of several hosts of one run on a store in a bucket.

Host i of n builds the units u with u % n == i and waits for the others. If no unit is added for longer than a unit can
take, a host builds the missing units itself. This is wasteful but safe, because all hosts write the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forerun.data.tokens.unit import Unit, listed_units
from forerun.storage.folder import Folder

POLL_SECONDS = 5.0
LISTING_SHARE = 0.1  # of the waiting time; listing a store of 52,000 units takes seconds
PATIENCE_SECONDS = 60.0
SLOW_BYTES_PER_SECOND = 1e6  # a worker that tokenizes at this speed is slow


def missing_after_waiting(
    store: Folder,
    units: Sequence[Unit],
    is_complete: Callable[[], bool],
    *,
    first: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Unit] | None:
    """Wait until other hosts have finished the store. Return None if they have, else the units to build here.

    Args:
        store: The store.
        units: All units of the store.
        is_complete: Returns whether the index exists.
        first: Whether this is the host that writes the index. Another one does so only if the index is late.
        sleep: Waits for a number of seconds.
        clock: Returns the time in seconds.

    Returns:
        None if the store is complete. An empty list if all units exist and this host must write the index.
    """
    known, changed = -1, clock()
    while not is_complete():
        began = clock()
        names = listed_units(store)
        missing = [unit for unit in units if unit.name not in names]
        now = clock()
        if len(missing) != known:
            known, changed = len(missing), now
        if not missing and (first or now - changed > PATIENCE_SECONDS):
            return []
        largest = max((unit.size_bytes for unit in missing), default=0)
        if missing and now - changed > PATIENCE_SECONDS + largest / SLOW_BYTES_PER_SECOND:
            return missing
        sleep(max(POLL_SECONDS, (now - began) / LISTING_SHARE))
    return None
