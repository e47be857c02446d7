"""Files of a dataset on the hub that are read by byte ranges, without a download.

`RangeFiles` has the methods of an fsspec file system that data files use. The hub client sends the requests, with the
token that it finds itself. Paths name a commit, so their content never changes: `datasets/owner/name@commit/file`.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any, BinaryIO, cast

from forerun.errors import UserError
from forerun.hub.client import guard_client
from forerun.hub.errors import to_user_error
from forerun.storage.address import Address
from forerun.units import MIB

ATTEMPTS = 4
BLOCK_BYTES = 4 * MIB  # of files that are read from start to end


class RangeFiles:
    """Files of datasets, by paths such as `datasets/owner/name@commit/data/0.parquet`."""

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Return a stream that reads by ranges.

        The readers of Parquet ask for exactly the parts that they need, so nothing is read ahead. Other files are read
        in blocks.
        """
        exact = path.endswith(".parquet")
        options = {"cache_type": "none"} if exact else {"cache_type": "readahead", "block_size": BLOCK_BYTES}
        try:
            return cast(BinaryIO, self._stream(self._client, path, mode="rb", **options))
        except Exception as error:
            raise _converted(error, path) from error

    def info(self, path: str) -> dict[str, Any]:
        """Return the size of a file, and its SHA-256 if the hub knows it, which it does for large files."""
        try:
            about = self._client.info(path)
        except Exception as error:
            raise _converted(error, path) from error
        lfs = about.get("lfs")
        return {"size": about["size"]} | ({"sha256": lfs["sha256"]} if lfs else {})

    def unstrip_protocol(self, path: str) -> str:
        return str(Address("hf", path))

    @cached_property
    def _client(self) -> Any:
        import huggingface_hub

        guard_client()
        return huggingface_hub.HfFileSystem()

    @cached_property
    def _stream(self) -> Any:
        """The client's class of open files, with repeated attempts and errors for users."""
        import huggingface_hub

        class Stream(huggingface_hub.HfFileSystemFile):
            def _fetch_range(self, start: int, end: int) -> bytes:
                wanted = min(end, self.size) - start
                for attempt in range(ATTEMPTS):
                    try:
                        found = super()._fetch_range(start, end)
                        if len(found) == wanted:
                            return bytes(found)
                        error: Exception = ConnectionError(f"{len(found)} bytes instead of {wanted}")
                    except Exception as raised:
                        error = raised
                        if 400 <= _status(raised) < 500:
                            break
                    if attempt + 1 < ATTEMPTS:
                        time.sleep(attempt)
                raise _converted(error, self.path) from error

        return Stream


def _status(error: Exception) -> int:
    """Return the status of an answer of the hub, or 0."""
    from huggingface_hub.errors import HfHubHTTPError

    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) and error.response is not None else 0


def _converted(error: Exception, path: str) -> Exception:
    """Return the error for users. Messages of the client may contain signed addresses."""
    name, _, rest = path.removeprefix("datasets/").partition("@")
    found = to_user_error(error, name, rest.partition("/")[0], downloading=True, kind="dataset")
    if isinstance(found, UserError):
        return found
    return UserError(
        "E-HUB-062",
        f"{path} cannot be read from the hub",
        why=type(error).__name__,
        fix="run the same command again: finished units are kept",
    )
