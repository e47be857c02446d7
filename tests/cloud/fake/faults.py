"""Faults of the network and of the API that a test injects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["error", "refuse", "lost", "duplicate", "slow", "malformed"]
STATUS = {
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    403: "PERMISSION_DENIED",
    401: "UNAUTHENTICATED",
}
# Contents of answers that no API sends. `types` keeps the keys of the answer.
MALFORMED = {
    "null": b"null",
    "list": b'[{"name": "x"}]',
    "html": b"<html><title>502</title></html>",
    "truncated": b'{"name": "projects/x", "nodes": [{"na',
    "empty": b"",
    "types": b"",
}


def malformed_content(body: str, answer: Mapping[str, Any]) -> bytes:
    """Return the content of a malformed answer in place of `answer`."""
    return json.dumps(dict.fromkeys(answer, 7)).encode() if body == "types" else MALFORMED[body]


class Dropped(Exception):
    """The connection ends without an answer."""


@dataclass
class Fault:
    """One fault, for the next requests that match.

    Attributes:
      kind: error: the API answers with `http` and does nothing. refuse: the connection ends before the API does
        anything. lost: the API acts, and its answer is lost. duplicate: the API gets the request twice. slow: the API
        acts after `seconds`. malformed: the API acts, and its answer has the content `body`.
      method: the HTTP method; an empty string for all.
      path: a regular expression that is searched in the path.
      count: for how many requests.
      skip: how many matching requests pass before.
      body: a key of `MALFORMED`.
      tag: a name for `FakeCloud.fired`.
    """

    kind: Kind
    method: str = ""
    path: str = ""
    count: int = 1
    skip: int = 0
    http: int = 503
    status: str = ""
    message: str = "The service is currently unavailable."
    seconds: float = 0.0
    body: str = ""
    tag: str = ""


class Faults:
    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self.fired: list[str] = []

    def add(self, values: dict[str, Any]) -> None:
        fault = Fault(**values)
        fault.status = fault.status or STATUS.get(fault.http, "UNKNOWN")
        self.waiting.append(fault)

    def take(self, method: str, path: str, now: float) -> Fault | None:
        """Return the fault for a request and count it."""
        for fault in self.waiting:
            if (fault.method in ("", method)) and re.search(fault.path, path):
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.count -= 1
                self.fired.append(fault.tag)
                if fault.count <= 0:
                    self.waiting.remove(fault)
                return fault
        return None
