"""The fields that the APIs accept. They refuse a request with an unknown name or an unknown value of an enum.

`fields.json` is made from the messages of gcloud: `python fields.py` writes it again.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fake.world import invalid

FILE = Path(__file__).with_name("fields.json")
GCLOUD = Path("/usr/lib/google-cloud-sdk/lib")
ROOTS = {
    "tpu/v2": ("Node", "QueuedResource", "GetGuestAttributesRequest"),
    "tpu/v2alpha1": ("Node", "QueuedResource", "GetGuestAttributesRequest"),
    "compute/v1": ("Instance", "InstanceTemplate", "InstanceGroupManager", "ResourcePolicy", "Disk", "Firewall"),
}
# Newer than gcloud 528. Sources: the REST references of the APIs.
NEWER: dict[str, dict[str, dict[str, Any]]] = {
    "tpu/v2": {},
    "tpu/v2alpha1": {},
    "compute/v1": {
        "Scheduling": {"skipGuestOsShutdown": "value", "preemptionNoticeDuration": "map"},
        "InstanceGroupManager": {"targetSizePolicy": "map"},
        "InstanceParams": {"requestValidForDuration": "map"},
    },
}
NEWER_VALUES = ("FLEX_START", "RESERVATION_BOUND", "V6E", "TPU7X")


def check(api: str, message: str, body: dict[str, Any], where: str = "") -> None:
    """Raise what the API answers to a field that it does not have."""
    fields = tables()[api][message] | NEWER[api].get(message, {})
    for name, value in body.items():
        place = f"{where}.{name}" if where else name
        if name not in fields:
            at = f" at '{where}'" if where else ""
            raise invalid(f'Invalid JSON payload received. Unknown name "{name}"{at}: Cannot find field.')
        kind = fields[name]
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            spot = f"{place}[{index}]" if isinstance(value, list) else place
            if isinstance(kind, list):
                if one not in kind and one not in NEWER_VALUES:
                    raise invalid(f"Invalid value at '{spot}' ({message}), \"{one}\"")
            elif kind not in ("value", "map"):
                if not isinstance(one, dict):
                    raise invalid(f"Invalid value at '{spot}' (type {kind}), \"{one}\"")
                check(api, kind, one, spot)


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text("utf-8"))
    return found


def from_gcloud() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the fields of all messages that a request can contain, from the messages of gcloud."""
    for folder in (GCLOUD / "third_party", GCLOUD):
        sys.path.insert(0, str(folder))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for api, roots in ROOTS.items():
        name = api.replace("/", "_")
        module = importlib.import_module(
            f"googlecloudsdk.generated_clients.apis.{api.replace('/', '.')}.{name}_messages"
        )
        found[api] = {}
        waiting = [getattr(module, root) for root in roots]
        while waiting:
            message = waiting.pop()
            if message.__name__ in found[api]:
                continue
            fields: dict[str, Any] = {}
            for field in message.all_fields():
                kind = getattr(field, "type", None)
                if type(field).__name__ == "EnumField":
                    fields[field.name] = sorted(kind.names())
                elif type(field).__name__ != "MessageField" or "Value" in kind.__name__ or not is_top(module, kind):
                    fields[field.name] = "map" if type(field).__name__ == "MessageField" else "value"
                else:
                    fields[field.name] = kind.__name__
                    waiting.append(kind)
            found[api][message.__name__] = dict(sorted(fields.items()))
        found[api] = dict(sorted(found[api].items()))
    return found


def is_top(module: Any, kind: type) -> bool:
    return getattr(module, re.sub(r".*\.", "", kind.__qualname__), None) is kind


if __name__ == "__main__":
    FILE.write_text(json.dumps(from_gcloud(), indent=0, sort_keys=True) + "\n", "utf-8")
