"""Opening of a folder by its address."""

from __future__ import annotations

from pathlib import Path

from forerun.reporter import SILENT, Reporter
from forerun.storage.address import Address
from forerun.storage.bucket import BucketFolder
from forerun.storage.folder import Folder, LocalFolder
from forerun.storage.retries import NONE, RetrySchedule


def folder_at(address: str | Path | Folder, schedule: RetrySchedule = NONE, reporter: Reporter = SILENT) -> Folder:
    """Return the folder at a path or at the address of a bucket. Nothing is opened or created.

    Args:
      address: a path, or an address such as `gs://bucket/folder`. A folder is returned as it is.
      schedule: the schedule of `with_retries`; for buckets only.
      reporter: receives a line for each failed try of `with_retries`, in the thread that made it.

    Raises:
      UserError: the address is neither a path nor that of a bucket.
    """
    if not isinstance(address, str | Path):
        return address
    if Address.of(address).is_remote:
        return BucketFolder(str(address), schedule, reporter)
    return LocalFolder(Path(address))
