"""The log of a run's checkpoints: numbered records, each created once, never changed.

A record is either a commit (this checkpoint exists, and these are its files) or a claim (from here on, this process
is the owner). An owner appends only directly after its own last record. A second process that takes the run over
appends a claim there, so the first one finds its next number taken, whenever it wakes up: it can never commit again.
The number of its claim is an owner's fencing number. Nothing here depends on a clock, on locks or on leases, and
there is nothing to clean up after a kill.

Commits may be removed; claims never are, since each of them stands where an older owner would write next.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.checkpoint.manifest import Manifest
from forerun.checkpoint.patience import Away
from forerun.checkpoint.place import PART, Place

FOLDER = "commits"
FORMAT = 1


@dataclass(frozen=True)
class Claim:
    number: int
    owner: str
    token: str = field(default="", repr=False, compare=False)  # random, different in every record

    @property
    def fence(self) -> int:
        return self.number


@dataclass(frozen=True)
class Commit:
    number: int
    fence: int
    step: int
    folder: str
    files: Manifest = field(repr=False)
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Broken:
    """A record that is not what was written, or (not `damaged`) that cannot be read at the moment."""

    number: int
    why: str
    damaged: bool = True


class Log:
    def __init__(self, place: Place) -> None:
        self.place = place
        self._known: dict[int, Claim | Commit] = {}

    def records(self) -> list[Claim | Commit | Broken]:
        """Ascending; each is read once."""
        numbers = self._numbers()
        self._known = {number: record for number, record in self._known.items() if number in numbers}
        found: list[Claim | Commit | Broken] = []
        for number in sorted(numbers):
            record = self._known.get(number) or self._read(number)
            if isinstance(record, Claim | Commit):
                self._known[number] = record
            if record is not None:
                found.append(record)
        return found

    def commits(self) -> list[Commit]:
        return [record for record in self.records() if isinstance(record, Commit)]

    def claim(self, owner: str) -> Claim:
        """Take the run over: everybody who owned it before is refused from now on."""
        while True:
            number = max(self._numbers(), default=0) + 1
            if self._create(number, {"kind": "claim", "owner": owner}):
                return Claim(number, owner)

    def commit(self, commit: Commit) -> bool:
        """False if another owner has taken the number."""
        body = {"kind": "commit", "fence": commit.fence, "step": commit.step, "folder": commit.folder}
        files = {name: list(about) for name, about in commit.files.items()}
        return self._create(commit.number, {**body, "files": files, "record": dict(commit.record)})

    def owner(self) -> Claim | None:
        """The last to have claimed the run."""
        return next((record for record in reversed(self.records()) if isinstance(record, Claim)), None)

    def identity(self) -> str:
        """Return a random text that is the same for all owners of this run: claims are never removed."""
        return next((record.token for record in self.records() if isinstance(record, Claim)), "")

    def remove(self, commit: Commit) -> None:
        self.place.remove(_name(commit.number))

    def bury_broken(self) -> None:
        """Put a claim in the place of a damaged record: the number stays taken, and it is not told again and again."""
        for record in self.records():
            if isinstance(record, Broken) and record.damaged:
                self.place.remove(_name(record.number))
                self._create(record.number, {"kind": "claim", "owner": "nobody: a damaged record was here"})

    def remove_parts(self, last: int) -> None:
        """What is left of writing records up to the number `last`: none of it can become one any more."""
        for name in self.place.names(FOLDER):
            number = name.split(".")[0]
            if name.endswith(PART) and number.isdigit() and int(number) <= last:
                self.place.remove(f"{FOLDER}/{name}")

    def _numbers(self) -> set[int]:
        stems = (name.removesuffix(".json") for name in self.place.names(FOLDER) if name.endswith(".json"))
        return {int(stem) for stem in stems if stem.isdigit()}

    def _create(self, number: int, body: dict[str, Any]) -> bool:
        whole = {"format": FORMAT, "number": number, "token": secrets.token_hex(8), **body}
        return self.place.create(_name(number), _encoded(whole))

    def _read(self, number: int) -> Claim | Commit | Broken | None:
        try:
            return _decoded(number, self.place.read(_name(number)))
        except FileNotFoundError:  # removed by its owner since it was listed
            return None
        except Away:  # an older checkpoint must not be taken because the network is down
            raise
        except OSError as error:
            return Broken(number, f"its commit record cannot be read ({error.strerror or error})", damaged=False)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:012d}.json"


def _encoded(body: dict[str, Any]) -> bytes:
    """One way only to write it, and its digest with it: a change of any bit shows."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"body": body, "sha256": _sha256(text)}, sort_keys=True, separators=(",", ":")).encode()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _decoded(number: int, content: bytes) -> Claim | Commit | Broken:
    try:
        body = json.loads(content)["body"]
        if _encoded(body) != content:
            return Broken(number, "its commit record is damaged (digest differs)")
        if body["format"] != FORMAT:
            return Broken(number, f"its record has format {body['format']}; this forerun reads {FORMAT}", damaged=False)
        if body["number"] != number:
            return Broken(number, f"its commit record is that of commit {body['number']}")
        if body["kind"] == "claim":
            return Claim(number, body["owner"], body["token"])
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Commit(number, body["fence"], body["step"], body["folder"], files, body["record"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Broken(number, "its commit record is damaged (not what forerun writes)")
