"""The folder at a location: a path of this machine, or the address of a bucket."""

from __future__ import annotations

from pathlib import Path

from forerun.data.storage.folder import LocalFolder, StoreFolder
from forerun.storage.address import Address


def folder_at(address: str | Path | StoreFolder) -> StoreFolder:
    """Return the folder at a path or at the address of a bucket. Nothing is opened or created.

    A folder is returned as it is.
    """
    if not isinstance(address, str | Path):
        return address
    if Address.of(address).is_bucket:
        from forerun.data.storage.bucket import BucketFolder  # most jobs do not need it

        return BucketFolder(str(address))
    return LocalFolder(Path(address))
