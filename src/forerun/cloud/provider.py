"""The protocol of a provider of machines, and the values that it exchanges with the controller.

A provider translates between these values and one cloud API. It takes no decisions: when to create, what to do after a
preemption and when to delete are decided in `forerun.cloud.control`. To add a provider, implement `Provider` and pass
it to the controller.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from forerun.errors import UserError

Capacity = Literal["on-demand", "spot", "flex-start", "reservation"]


class SliceState(enum.Enum):
    """The state of a slice, with one meaning for all providers."""

    ABSENT = "absent"  # no such resource: it was never created, or it is deleted
    WAITING = "waiting"  # requested; waits for capacity. Nothing is billed.
    CREATING = "creating"  # the machines are being created
    READY = "ready"  # the machines run and are billed
    PREEMPTED = "preempted"  # the cloud took the machines; the resource must be deleted
    FAILED = "failed"  # it will not become ready (no capacity, quota, error, expired); the resource must be deleted
    STOPPED = "stopped"  # the machines do not run, but the resource exists and must be deleted
    DELETING = "deleting"


class Failure(enum.Enum):
    """Why a request failed, as far as the controller acts on it."""

    CAPACITY = "capacity"  # no machines there now: try another zone, or again later
    QUOTA = "quota"  # the project may not have that many: another zone or slice may work
    PERMISSION = "permission"  # the credentials do not allow it, or the zone does not offer the slice
    INVALID = "invalid"  # the request itself is wrong: never repeat it
    OTHER = "other"


@dataclass(frozen=True)
class SliceRequest:
    """What to create. A second request with the same `name` and `zone` must not create a second slice.

    Attributes:
      name: the name of the resource (`forerun.cloud.labels.resource_name`).
      slice: the slice, such as `v6e-8`, or a GPU machine type, such as `a3-highgpu-8g`.
      labels: labels of every resource that is created for the request, from its creation on.
      metadata: instance metadata. It never contains a secret.
      limit_seconds: after this time, the API itself deletes the machines, if it can for this capacity; None: no limit.
      request_id: a UUID that makes repeated requests idempotent.
      wait_seconds: how long a queued request may wait for capacity; None: for ever.
      service_account: None: the default account of the project.
      internal_only: create the machines without external addresses.
    """

    name: str
    slice: str
    zone: str
    capacity: Capacity
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    request_id: str
    limit_seconds: int | None = None
    wait_seconds: int | None = None
    disk_gib: int | None = None
    image: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    reservation: str | None = None
    internal_only: bool = False


@dataclass(frozen=True)
class SliceStatus:
    """The state of a slice.

    Attributes:
      detail: the cloud's own word for the state, and its message if there is one.
      ready_at: since when it is billed, in seconds since 1970, if the API tells it.
      ended_at: until when it was billed, if it does not run any more and the API tells it.
    """

    state: SliceState
    detail: str = ""
    failure: Failure | None = None
    ready_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class Resource:
    """One resource that exists in the cloud and that forerun created.

    Attributes:
      provider: the name of the provider that can delete it.
      kind: the cloud's word: `node`, `queued resource`, `instance`, `instance group`, `template`, `policy`, `disk`.
      slice: the slice or machine type, or an empty string for resources without machines.
      created_at: in seconds since 1970, or None if the API does not tell it.
      costs_money: False for kinds that cost nothing by themselves.
    """

    provider: str
    kind: str
    name: str
    zone: str
    status: SliceStatus
    labels: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    slice: str = ""
    capacity: str = ""
    created_at: float | None = None
    costs_money: bool = True


@dataclass(frozen=True)
class HostAddress:
    """A host of a slice. `address` is the one that this machine can reach by ssh; `internal` is inside the slice.

    `instance` is the name of the machine in the cloud, which tunnels need; empty if it is not known.
    """

    index: int
    address: str
    internal: str
    port: int = 22
    instance: str = ""


class Provider(Protocol):
    """A cloud API, or a list of existing machines.

    Every method may raise UserError for what the user must fix (credentials, permissions, an invalid request), and
    `CloudUnavailable` for failures that may pass. Temporary failures (429, 503, lost responses) are repeated inside.
    """

    @property
    def name(self) -> str: ...

    def now(self) -> float:
        """Return the time of the cloud's clock, in seconds since 1970. It does not depend on this machine's clock."""

    def enforces_limit(self, request: SliceRequest) -> bool:
        """Return whether the API itself deletes the machines of this request after `limit_seconds`."""

    def create(self, request: SliceRequest) -> None:
        """Request a slice and return when the cloud has accepted the request. Do nothing if it exists already.

        Raises:
          RequestRefused: The cloud refused the request; `failure` says why.
        """

    def status(self, name: str, zone: str) -> SliceStatus:
        """Return the state of a slice. Errors that the cloud reports later, inside an operation, are included."""

    def delete(self, name: str, zone: str) -> float | None:
        """Delete a slice and everything that was created for it, and return when nothing of it exists any more.

        Do nothing if it does not exist. Return the time at which billing ended, if the API tells it.
        """

    def list(self) -> Sequence[Resource]:
        """Return everything that forerun created here and that exists, in all zones, billed or not."""

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        """Return the hosts of a slice that is ready, in the order of their index."""

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        """Return the public ssh host keys of each host, as `ssh-ed25519 AAAA...`; an empty list if not known yet."""

    def requests(self, request: SliceRequest) -> Sequence[Mapping[str, object]]:
        """Return the HTTP requests that `create` sends, as {method, url, body}, for `--dry-run`. Send nothing."""


class CloudUnavailable(Exception):
    """The cloud's API does not answer, after several tries. It may answer later."""


class ApiDisabled(UserError):
    """The project has not enabled an API. It therefore has no resources there."""


class NameTaken(UserError):
    """The resource with the name of the slice belongs to another run, so nothing may control or delete it."""


class ZonesUnreachable(CloudUnavailable):
    """Some zones do not answer. `resources` has what the others list; more may exist in `zones`."""

    def __init__(self, zones: Sequence[str], resources: Sequence[Resource]) -> None:
        super().__init__(f"these zones do not answer, and may have resources: {', '.join(zones)}")
        self.zones = tuple(zones)
        self.resources = tuple(resources)


class RequestRefused(Exception):
    """The cloud refused a request, with its own message."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


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
