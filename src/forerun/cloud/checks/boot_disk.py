"""The check of the size of the boot disk against the size of the data."""

from __future__ import annotations

import math
import re

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed
from forerun.cloud.google.rest import Rest
from forerun.storage.address import Address
from forerun.units import GIB, Bytes

DEFAULT_GIB = 100  # of the images of the Cloud TPU API
SYSTEM_GIB = 30  # an estimate: the image, Python and its packages, and the compile cache
COPIES = 2  # the data itself, and the tokens that are made of it


def check_boot_disk(rest: Rest, need: CloudNeed) -> CloudFinding:
    """Warn if the data may fill the disk. The sizes of downloads from a hub are not known here."""
    size = need.disk_gib or DEFAULT_GIB
    data_bytes = COPIES * (need.data_bytes + sum(bytes_at(rest, address) for address in need.data_addresses))
    needed = SYSTEM_GIB + data_bytes / GIB
    found = f"{size} GiB; the system needs about {SYSTEM_GIB} GiB, and the data at most {Bytes(data_bytes)}"
    if needed <= size:
        return CloudFinding("boot disk", "ok", found)
    return CloudFinding("boot disk", "warn", found, f"forerun run ... --disk-gib {math.ceil(needed / 50) * 50}")


def bytes_at(rest: Rest, address: str) -> int:
    """Return the size of all objects below an address such as `gs://bucket/text/*.jsonl`."""
    parsed = Address.of(address)
    prefix = re.split(r"[*?\[{]", parsed.prefix, maxsplit=1)[0]
    pages = rest.pages("storage", f"b/{parsed.bucket}/o", {"prefix": prefix, "fields": "items(size),nextPageToken"})
    return sum(int(one.get("size") or 0) for page in pages for one in page.get("items") or ())
