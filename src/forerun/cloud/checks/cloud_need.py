"""What a cloud run needs, and the result of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.cloud.provider import Capacity


@dataclass(frozen=True)
class CloudFinding:
    """The result of one check. `fix` is the command or edit that helps; empty if nothing is wrong."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class CloudNeed:
    """What is checked.

    Attributes:
      slice: the slice to rent, or an empty string: then quota is listed, not compared.
      zones: where it may be rented.
      provider: `tpu` or `compute`.
      bucket: the name of the bucket, or an empty string.
      data_bytes: the size of the job's local data.
      data_addresses: where the rest of the data is, such as `gs://bucket/text`.
      disk_gib: the size of the boot disk; None: the default of the image.
    """

    slice: str = ""
    zones: Sequence[str] = ()
    capacity: Capacity = "on-demand"
    provider: str = "tpu"
    hosts: int = 1
    bucket: str = ""
    has_job: bool = False
    data_bytes: int = 0
    data_addresses: Sequence[str] = ()
    disk_gib: int | None = None
    network: str = "default"
    service_account: str | None = None


def region_of(zone: str) -> str:
    return zone.rsplit("-", 1)[0]
