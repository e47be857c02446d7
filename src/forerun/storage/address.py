"""Addresses of files and folders: paths of this machine, buckets, web servers and the Hugging Face Hub.

This is the only module that looks for the protocol of an address. A test searches the others for such code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUCKET_PROTOCOLS = ("gs", "s3")
WEB_PROTOCOLS = ("http", "https")
_SEPARATOR = "://"


@dataclass(frozen=True)
class Address:
    """A parsed address. `str()` returns the text as the user wrote it.

    Attributes:
      protocol: the text before `://`, such as `gs`, `s3`, `https` or `hf`; None for a path of this machine.
      rest: the text after `://`; for a path of this machine, the path.
    """

    protocol: str | None
    rest: str

    @classmethod
    def of(cls, text: str | Path) -> Address:
        """Parse an address. Every text is valid: what has no protocol is a path of this machine."""
        protocol, separator, rest = str(text).partition(_SEPARATOR)
        return cls(protocol, rest) if separator else cls(None, str(text))

    def __str__(self) -> str:
        return self.rest if self.protocol is None else f"{self.protocol}{_SEPARATOR}{self.rest}"

    @property
    def is_remote(self) -> bool:
        """Whether the address has a protocol, so that it is not a path of this machine."""
        return self.protocol is not None

    @property
    def is_bucket(self) -> bool:
        """Whether the address names a bucket: `gs://` or `s3://`."""
        return self.protocol in BUCKET_PROTOCOLS

    @property
    def is_web(self) -> bool:
        """Whether the address names a file of a web server: `https://` or `http://`."""
        return self.protocol in WEB_PROTOCOLS

    @property
    def bucket(self) -> str:
        """The name of the bucket; for other protocols, the text up to the first slash."""
        return self.rest.partition("/")[0]

    @property
    def prefix(self) -> str:
        """The names of objects at this address begin with this text."""
        return self.rest.partition("/")[2]
