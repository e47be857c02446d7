"""Folders below a prefix of a bucket, by the key-value stores of TensorStore (ADR 0032).

What was checked on the wire, with TensorStore 0.1.86:

- `create` is atomic in the service: `ifGenerationMatch=0` on Google Cloud Storage, `If-None-Match: *` on S3. If the
  answer to a successful create is lost, the driver repeats the request and the service refuses it, so a refused create
  may be one's own. The caller compares the content.
- A refused create and a missing bucket of S3 give the same answer, so `create` looks for the object.
- The listing of Google Cloud Storage is empty if it is not allowed or if there is no such bucket. `files` then asks for
  an object that does not exist, which the service denies to a client that may not list. A missing bucket is found by
  the first write.
- A listing has no sizes, and a range that the object does not have completely is an error without content.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

from forerun.errors import UserError, first_line
from forerun.reporter import SILENT, Reporter
from forerun.storage.address import Address
from forerun.storage.folder import FileRange
from forerun.storage.retries import (
    NONE,
    REQUEST_RETRIES,
    SILENT_SECONDS,
    RetrySchedule,
    StorageUnavailable,
    with_retries,
)

T = TypeVar("T")

CONCURRENT_REQUESTS = 64  # of a process; more wait in the driver
READ_AT_ONCE = 1024  # files of `read_many` whose contents are requested together
CREATE_TRIES = 3
DRIVERS = {"gs": "gcs", "s3": "s3"}
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_TEMPORARY = (
    *("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CURL error", "CANCELLED"),
    *("HTTP response code: 5", "HTTP response code: 429", "HTTP response code: 408"),
)
_SHORT = ("OUT_OF_RANGE", "Unexpected Content-Range")  # the object ends before the range


@dataclass(frozen=True)
class BucketFolder:
    """A folder in a bucket. It is pickled as its address; each process opens its own connections."""

    address: str
    schedule: RetrySchedule = field(default=NONE, compare=False)
    reporter: Reporter = field(default=SILENT, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.address.rstrip("/"))
        if not self._parsed.is_bucket or not self._parsed.bucket:
            raise UserError(
                "E-DATA-174",
                f"{self.address} is not an address of a folder in a bucket",
                why="an address has the form gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
                fix="correct the address, or name a folder of this machine",
            )

    def __reduce__(self) -> tuple[type[BucketFolder], tuple[str]]:
        return BucketFolder, (self.address,)

    @property
    def location(self) -> str:
        return self.address

    @property
    def is_local(self) -> bool:
        return False

    @property
    def repeated_requests(self) -> int:
        import tensorstore

        driver = DRIVERS[self._parsed.protocol or ""]
        metrics = tensorstore.experimental_collect_matching_metrics(f"/tensorstore/kvstore/{driver}/retries")
        return sum(int(value["value"]) for metric in metrics for value in metric["values"])

    def with_retries(self, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                if isinstance(error, UserError) or not is_temporary(error):
                    raise
                raise _unavailable(f"the bucket of {self.address} does not answer", first_line(error)) from error

        return with_retries(attempt, self.schedule, self.reporter)

    def inside(self, name: str) -> BucketFolder:
        return BucketFolder(f"{self.address}/{name}", self.schedule, self.reporter)

    def names(self, folder: str = "") -> list[str]:
        top = self.inside(folder) if folder else self
        return sorted({name.partition("/")[0] for name in top.files()})

    def files(self) -> set[str]:
        prefix = self._key("")
        with self._errors("listed"):
            keys = self._store.list(_range(prefix), strip_prefix_length=len(prefix.encode())).result()
        names = {key.decode() for key in keys}
        if not names and self._parsed.protocol == "gs":
            self.exists(f"{secrets.token_hex(8)}.part")  # raises UserError if the client may not list
        return {name for name in names if name and not name.endswith("/")}

    def exists(self, name: str) -> bool:
        with self._errors("read"):
            return bool(self._store.read(self._key(name), byte_range=slice(0, 0)).result().state == "value")

    def read(self, name: str) -> bytes:
        (content,) = self.read_many([name])
        if content is None:
            raise self._missing(name)
        return content

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        contents: list[bytes | None] = []
        for first in range(0, len(names), READ_AT_ONCE):
            some = names[first : first + READ_AT_ONCE]
            with self._errors("read"):
                answers = [self._store.read(self._key(name)) for name in some]
                results = [answer.result() for answer in answers]
            contents += [result.value if result.state == "value" else None for result in results]
        return contents

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        return self._read_slices([(name, slice(start, stop)) for name, start, stop in ranges])

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        (content,) = self.read_ranges([FileRange(name, start, start + count)])
        if count and not content:  # the object ends within the range: read to its end, which is nearer
            (content,) = self._read_slices([(name, slice(start, None))])
        yield content[:count]

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

    def require_folders(self, name: str) -> None:
        """Raise an error if the bucket does not answer. A bucket needs no folders."""
        self.names(name)

    def flush(self, name: str) -> None:
        """Do nothing: every object that exists is durable."""

    @cached_property
    def _parsed(self) -> Address:
        return Address.of(self.address)

    @property
    def _store(self) -> Any:
        return _opened(self._parsed.protocol or "", self._parsed.bucket, _endpoint(self._parsed.protocol))

    def _key(self, name: str) -> str:
        prefix = self._parsed.prefix
        return f"{prefix}/{name}" if prefix else name

    def _read_slices(self, slices: Sequence[tuple[str, slice]]) -> list[bytes]:
        with self._errors("read"):
            answers = [self._store.read(self._key(name), byte_range=span) for name, span in slices]
            return [self._bytes_of(answer, name) for answer, (name, _) in zip(answers, slices, strict=True)]

    def _bytes_of(self, answer: Any, name: str) -> bytes:
        try:
            result = answer.result()
        except ValueError as error:
            if any(text in str(error) for text in _SHORT):
                return b""
            raise
        if result.state != "value":
            raise self._missing(name)
        return bytes(result.value)

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{name}")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Raise the errors of TensorStore as UserError, or as StorageUnavailable."""
        try:
            yield
        except ValueError as error:
            raise _error(self.address, done, str(error)) from error


def is_temporary(error: BaseException) -> bool:
    """Return whether the same call may succeed later, because the network or the service failed."""
    if isinstance(error, StorageUnavailable | ConnectionError | TimeoutError):
        return True
    if type(error).__module__.startswith("jax"):  # jax reports a full device with RESOURCE_EXHAUSTED
        return False
    return any(text in str(error) for text in _TEMPORARY)


def kvstore_spec(address: str) -> dict[str, Any]:
    """Return the TensorStore spec of an address, with the endpoint and the credentials of this process."""
    parsed = Address.of(address)
    endpoint = _endpoint(parsed.protocol)
    _close_silent_connections()
    spec: dict[str, Any] = {"driver": DRIVERS[parsed.protocol or ""], "bucket": parsed.bucket}
    if parsed.prefix:
        spec["path"] = parsed.prefix
    if parsed.protocol == "s3":
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
    return spec


def _error(address: str, done: str, text: str) -> UserError:
    why = " ".join(text.split())[:300]
    if any(word in text for word in _DENIED):
        return UserError(
            "E-DATA-170",
            f"{address} cannot be {done}: the service denies it",
            why=why,
            fix=_LOGIN[Address.of(address).protocol or ""],
        )
    if "NOT_FOUND" in text:
        return _missing_bucket(address, why)
    if any(word in text for word in _TEMPORARY):
        return _unavailable(f"{address} cannot be {done} now: the service does not answer", why)
    return UserError(
        "E-DATA-173",
        f"{address} cannot be {done}: the service rejects the request",
        why=why,
        fix="compare the address, the region and the endpoint with those of the bucket, or name another bucket",
    )


def _unavailable(what: str, why: str) -> StorageUnavailable:
    return StorageUnavailable(
        "E-DATA-172",
        what,
        why=why,
        fix="wait until the network and the service work, then run the same command again; what is stored is kept",
    )


_LOGIN = {
    "gs": "log in with gcloud auth application-default login, or allow the service account of this machine to read, "
    "list and create objects (roles/storage.objectUser)",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; allow s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket",
}


def _missing_bucket(address: str, why: str) -> UserError:
    parsed = Address.of(address)
    root = Address(parsed.protocol, parsed.bucket)
    make = f"gcloud storage buckets create {root}" if parsed.protocol == "gs" else f"aws s3 mb {root}"
    return UserError(
        "E-DATA-171",
        f"the bucket of {address} does not exist",
        why=why,
        fix=f"correct its name in the job, or create it: {make}",
    )


def _endpoint(protocol: str | None) -> str | None:
    """Return the address of a service other than the public one, as the usual variables name it."""
    if protocol == "s3":
        return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return os.environ.get("TENSORSTORE_GCS_HTTP_URL") or os.environ.get("STORAGE_EMULATOR_HOST")


@cache
def _opened(protocol: str, bucket: str, endpoint: str | None) -> Any:
    """Return the open store of a bucket. A process has one for each bucket, which all threads share."""
    import tensorstore

    root = str(Address(protocol, bucket))
    try:
        return tensorstore.KvStore.open(kvstore_spec(root), context=_context(DRIVERS[protocol])).result()
    except ValueError as error:
        raise _error(root, "opened", str(error)) from error


@cache
def _context(driver: str) -> Any:
    """Return the limits of requests, which all buckets of a service share."""
    import tensorstore

    return tensorstore.Context(
        {f"{driver}_request_concurrency": {"limit": CONCURRENT_REQUESTS}, f"{driver}_request_retries": REQUEST_RETRIES}
    )


def _close_silent_connections() -> None:
    """Set the timeouts of TensorStore. By default it waits forever on an open connection without data."""
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(SILENT_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(SILENT_SECONDS))


@cache
def _absent() -> bytes:
    """Return the generation that TensorStore gives to a key without a value."""
    import tensorstore

    return bytes(tensorstore.KvStore.open({"driver": "memory"}).result().read("absent").result().stamp.generation)


def _range(prefix: str) -> Any:
    """Return the range of all keys that begin with a prefix. The prefix ends with `/`, or is empty."""
    import tensorstore

    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/" in ASCII
