"""Folders below a prefix of a bucket, by the key-value stores of TensorStore (ADR 0017).

What was checked on the wire, with TensorStore 0.1.86:

- `create` is atomic in the service: `ifGenerationMatch=0` on Google Cloud Storage, `If-None-Match: *` on S3. If the
  answer to a successful create is lost, the driver repeats the request and the service refuses it, so a refused create
  may be one's own. The caller compares the content.
- A refused create and a missing bucket of S3 give the same answer, so `create` looks for the object.
- The listing of Google Cloud Storage is empty if it is not allowed or if there is no such bucket. No decision depends
  on an empty listing alone: `require_writable` finds both mistakes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from forerun.data.storage.file_range import FileRange
from forerun.errors import StorageError, UserError

CONCURRENT_REQUESTS = 64  # of a process; more wait in the driver
READ_AT_ONCE = 1024  # files of `read_many` whose contents are requested together
# Ten tries with delays of 0.2 s to 8 s last about 40 s. A longer outage ends the process with a StorageError, after
# which a supervisor starts it again.
RETRIES = {"max_retries": 10, "initial_delay": "200ms", "max_delay": "8s"}
SILENT_SECONDS = 60  # a connection without any data for this long is closed, and the request is tried again
CREATE_TRIES = 3
DRIVERS = {"gs": "gcs", "s3": "s3"}
_ADDRESS = re.compile(r"(gs|s3)://([^/]+)(?:/(.*))?", re.ASCII)
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_TEMPORARY = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CURL error", "CANCELLED")
_SHORT = ("OUT_OF_RANGE", "Unexpected Content-Range")  # the object ends before the range


@dataclass(frozen=True)
class BucketFolder:
    """A folder in a bucket. It is pickled as its address; each process opens its own connections."""

    address: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.address.rstrip("/"))
        _parts(self.address)

    @property
    def is_local(self) -> bool:
        return False

    def inside(self, name: str) -> BucketFolder:
        return BucketFolder(f"{self.address}/{name}")

    def names(self) -> set[str]:
        return {name.partition("/")[0] for name in self.files()}

    def files(self) -> set[str]:
        """Return the names of all files below this folder, by one listing."""
        prefix = self._key("")
        with self._errors("listed"):
            found = self._store.list(_range(prefix), strip_prefix_length=len(prefix.encode())).result()
        return {name.decode() for name in found}

    def exists(self, name: str) -> bool:
        with self._errors("read"):
            return bool(self._store.read(self._key(name), byte_range=slice(0, 0)).result().state == "value")

    def read(self, name: str) -> bytes:
        (content,) = self.read_many([name])
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{name}")
        return content

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the content of each file, or None if it does not exist. Many are requested at the same time."""
        found: list[bytes | None] = []
        for first in range(0, len(names), READ_AT_ONCE):
            some = names[first : first + READ_AT_ONCE]
            with self._errors("read"):
                answers = [self._store.read(self._key(name)) for name in some]
                results = [answer.result() for answer in answers]
            found += [result.value if result.state == "value" else None for result in results]
        return found

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Return the bytes of each range; fewer, or none, if the file is shorter than the range says."""
        with self._errors("read"):
            answers = [self._store.read(self._key(one.name), byte_range=slice(one.start, one.stop)) for one in ranges]
            return [self._bytes_of(answer, one) for answer, one in zip(answers, ranges, strict=True)]

    def create(self, name: str, content: bytes) -> bool:
        for _ in range(CREATE_TRIES):
            with self._errors("written"):
                stamp = self._store.write(self._key(name), content, if_equal=_absent()).result()
            if stamp.generation:
                return True
            if self.exists(name):
                return False
        raise _missing_bucket(self.address, f"{name} can neither be created nor found")

    def replace(self, name: str, content: bytes) -> None:
        with self._errors("written"):
            self._store.write(self._key(name), content).result()

    def remove(self, name: str) -> None:
        with self._errors("removed"):
            self._store.write(self._key(name), None).result()
            self._store.delete_range(_range(f"{self._key(name)}/")).result()

    def require_writable(self) -> None:
        """Create and remove a small file, so that a missing permission is found before long work."""
        probe = f"{secrets.token_hex(8)}.part"
        self.create(probe, b"forerun\n")
        with suppress(UserError):  # some roles may create objects and not delete them
            self.remove(probe)

    @property
    def retries(self) -> int:
        """The requests of this process to the service that failed and were repeated by the driver."""
        import tensorstore

        driver = DRIVERS[_parts(self.address)[0]]
        found = tensorstore.experimental_collect_matching_metrics(f"/tensorstore/kvstore/{driver}/retries")
        return sum(int(value["value"]) for metric in found for value in metric["values"])

    @property
    def _store(self) -> Any:
        protocol, bucket, _ = _parts(self.address)
        return _opened(protocol, bucket, _endpoint(protocol))

    def _key(self, name: str) -> str:
        prefix = _parts(self.address)[2]
        return f"{prefix}/{name}" if prefix else name

    def _bytes_of(self, answer: Any, wanted: FileRange) -> bytes:
        try:
            result = answer.result()
        except ValueError as error:
            if any(text in str(error) for text in _SHORT):
                return b""
            raise
        if result.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{wanted.name}")
        return bytes(result.value)

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Raise the errors of TensorStore as UserError, or as StorageError if the same request may succeed later."""
        try:
            yield
        except ValueError as error:
            raise _error(self.address, done, str(error)) from error


def _error(address: str, done: str, text: str) -> UserError:
    why = " ".join(text.split())[:300]
    if any(word in text for word in _DENIED):
        return UserError(
            "E-DATA-170",
            f"{address} cannot be {done}: the service denies it",
            why=why,
            fix=_LOGIN[address[:2]],
        )
    if "NOT_FOUND" in text:
        return _missing_bucket(address, why)
    if any(word in text for word in _TEMPORARY):
        return StorageError(
            "E-DATA-172",
            f"{address} cannot be {done} now: the service does not answer",
            why=why,
            fix="wait until the network and the service work, then run the same command again; finished units are kept",
        )
    return UserError(
        "E-DATA-173",
        f"{address} cannot be {done}: the service rejects the request",
        why=why,
        fix="compare the address, the region and the endpoint with those of the bucket, or name another data.store",
    )


_LOGIN = {
    "gs": "log in with gcloud auth application-default login, or allow the service account of this machine to read, "
    "list and create objects (roles/storage.objectUser)",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; allow s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket",
}


def _missing_bucket(address: str, why: str) -> UserError:
    protocol, bucket, _ = _parts(address)
    make = f"gcloud storage buckets create gs://{bucket}" if protocol == "gs" else f"aws s3 mb s3://{bucket}"
    return UserError(
        "E-DATA-171",
        f"the bucket of {address} does not exist",
        why=why,
        fix=f"correct its name in data.store, or create it: {make}",
    )


@lru_cache(256)
def _parts(address: str) -> tuple[str, str, str]:
    """Return the protocol, the bucket and the prefix of an address."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(
            "E-DATA-174",
            f"{address} is not an address of a folder in a bucket",
            why="an address has the form gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
            fix="correct data.store",
        )
    return match[1], match[2], match[3] or ""


def _endpoint(protocol: str) -> str | None:
    """Return the address of a service other than the public one, as the usual variables name it."""
    if protocol == "s3":
        return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return os.environ.get("TENSORSTORE_GCS_HTTP_URL") or os.environ.get("STORAGE_EMULATOR_HOST")


@cache
def _opened(protocol: str, bucket: str, endpoint: str | None) -> Any:
    """Return the open store of a bucket. A process has one for each bucket, which all threads share."""
    import tensorstore

    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(SILENT_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(SILENT_SECONDS))
    driver = DRIVERS[protocol]
    spec: dict[str, Any] = {"driver": driver, "bucket": bucket}
    if protocol == "s3":
        if "AWS_ACCESS_KEY_ID" in os.environ:
            # The default searches all sources of credentials, and prints an error for each that this machine lacks.
            spec["aws_credentials"] = {"type": "environment"}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if endpoint:
            spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
        elif region:
            spec |= {"aws_region": region}
    elif endpoint:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", endpoint)
    try:
        return tensorstore.KvStore.open(spec, context=_context(driver)).result()
    except ValueError as error:
        raise _error(f"{protocol}://{bucket}", "opened", str(error)) from error


@cache
def _context(driver: str) -> Any:
    """Return the limits of requests, which all buckets of a service share."""
    import tensorstore

    return tensorstore.Context(
        {f"{driver}_request_concurrency": {"limit": CONCURRENT_REQUESTS}, f"{driver}_request_retries": RETRIES}
    )


@cache
def _absent() -> bytes:
    """Return the generation that TensorStore gives to a key without a value."""
    import tensorstore

    return bytes(tensorstore.KvStore.open({"driver": "memory"}).result().read("absent").result().stamp.generation)


def _range(prefix: str) -> Any:
    """Return the range of all keys that begin with a prefix. The prefix ends with `/`, or is empty."""
    import tensorstore

    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/" in ASCII
