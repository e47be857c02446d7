"""The log of a run's checkpoints: numbered records that are created once and never changed.

A record is either a commit (this checkpoint exists, and these are its files) or a claim (from here on, this process
owns the run). An owner appends only directly after its own last record. A process that takes the run over appends a
claim at this number. The former owner then finds its next number taken, even if it was suspended for long, and can
never commit again. The number of a claim is the fencing number of its owner. The log depends on no clocks, locks or
leases, and a killed process leaves nothing to clean up.

Commits may be removed. Claims are never removed, because each of them occupies the number that a former owner would
write next.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.checkpoint.manifest import Manifest
from forerun.errors import UserError
from forerun.storage.folder import PART, Folder, create_once
from forerun.storage.retries import StorageUnavailable

FOLDER = "commits"
FORMAT = 1


@dataclass(frozen=True)
class Claim:
    """The record of a process that became the owner of the run."""

    number: int
    owner: str
    token: str = field(default="", repr=False, compare=False)  # random, different in every record

    @property
    def fence(self) -> int:
        """The fencing number of the owner, which is the number of its claim."""
        return self.number


@dataclass(frozen=True)
class Commit:
    """The record of a complete checkpoint."""

    number: int
    fence: int  # fencing number of the owner that saved it
    step: int
    folder: str
    files: Manifest = field(repr=False)
    record: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenRecord:
    """A record that is damaged. If `damaged` is False, it may be good: it cannot be read now, or has a newer format."""

    number: int
    why: str
    damaged: bool = True


class Log:
    """The records of a run, in the folder `commits` of its checkpoints."""

    def __init__(self, storage: Folder) -> None:
        self.storage = storage
        self._known: dict[int, Claim | Commit] = {}

    def records(self) -> list[Claim | Commit | BrokenRecord]:
        """Return all records by ascending number. Good records are read once and then kept in memory."""
        numbers = self._numbers()
        self._known = {number: record for number, record in self._known.items() if number in numbers}
        found: list[Claim | Commit | BrokenRecord] = []
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
        """Take the run over: append a claim, so that no former owner can commit any more. Return the claim."""
        while True:
            number = max(self._numbers(), default=0) + 1
            if self._create(number, {"kind": "claim", "owner": owner}):
                return Claim(number, owner)

    def commit(self, commit: Commit) -> bool:
        """Append a commit. Return False if another record has its number already."""
        body = {"kind": "commit", "fence": commit.fence, "step": commit.step, "folder": commit.folder}
        files = {name: list(about) for name, about in commit.files.items()}
        return self._create(commit.number, {**body, "files": files, "record": dict(commit.record)})

    def owner(self) -> Claim | None:
        """Return the newest claim, or None."""
        return next((record for record in reversed(self.records()) if isinstance(record, Claim)), None)

    def identity(self) -> str:
        """Return a random text that identifies the run: the token of its first claim. Empty if there is no claim.

        All owners get the same text, because claims are never removed.
        """
        return next((record.token for record in self.records() if isinstance(record, Claim)), "")

    def remove(self, commit: Commit) -> None:
        self.storage.remove(_name(commit.number))

    def replace_broken(self) -> None:
        """Replace damaged records by claims, so that their numbers stay taken and they are reported only once."""
        for record in self.records():
            if isinstance(record, BrokenRecord) and record.damaged:
                self.storage.remove(_name(record.number))
                self._create(record.number, {"kind": "claim", "owner": "nobody: a damaged record was here"})

    def remove_parts(self, last: int) -> None:
        """Remove temporary files of records up to the number `last`. Their numbers are taken, so they are useless."""
        for name in self.storage.names(FOLDER):
            number = name.split(".")[0]
            if name.endswith(PART) and number.isdigit() and int(number) <= last:
                self.storage.remove(f"{FOLDER}/{name}")

    def _numbers(self) -> set[int]:
        numbers = self._listed()
        if numbers or self.storage.is_local or not self.storage.exists(_name(1)):
            return numbers
        # The first record is a claim and is never removed. If it exists and the listing stays empty, the listing is
        # wrong, and the run must not start from the beginning.
        numbers = self._listed()
        if not numbers:
            raise UserError(
                "E-CHECKPOINT-019",
                f"the checkpoints in {self.storage.address} cannot be listed",
                why="the first record of the run exists, and the listing of the bucket is empty",
                fix="allow this account to list the objects of the bucket",
            )
        return numbers

    def _listed(self) -> set[int]:
        """Return the numbers in the listing of the folder."""
        stems = (name.removesuffix(".json") for name in self.storage.names(FOLDER) if name.endswith(".json"))
        return {int(stem) for stem in stems if stem.isdigit()}

    def _create(self, number: int, body: dict[str, Any]) -> bool:
        record = {"format": FORMAT, "number": number, "token": secrets.token_hex(8), **body}
        return create_once(self.storage, _name(number), _encoded(record))

    def _read(self, number: int) -> Claim | Commit | BrokenRecord | None:
        try:
            return _decoded(number, self.storage.read(_name(number)))
        except FileNotFoundError:  # removed by its owner since it was listed
            return None
        except (
            StorageUnavailable
        ):  # not BrokenRecord: otherwise an older checkpoint would be used because the network is down
            raise
        except OSError as error:
            return BrokenRecord(number, f"its commit record cannot be read ({error.strerror or error})", damaged=False)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:012d}.json"


def _encoded(body: dict[str, Any]) -> bytes:
    """Return a record as canonical JSON with its digest. Decoding encodes it again, so any changed bit is found."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"body": body, "sha256": _sha256(text)}, sort_keys=True, separators=(",", ":")).encode()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _decoded(number: int, content: bytes) -> Claim | Commit | BrokenRecord:
    """Return the record with this number from the content of its file."""
    try:
        body = json.loads(content)["body"]
        if _encoded(body) != content:
            return BrokenRecord(number, "its commit record is damaged (digest differs)")
        if body["format"] != FORMAT:
            return BrokenRecord(
                number, f"its record has format {body['format']}; this version of forerun reads {FORMAT}", damaged=False
            )
        if body["number"] != number:
            return BrokenRecord(number, f"its commit record is that of commit {body['number']}")
        if body["kind"] == "claim":
            return Claim(number, body["owner"], body["token"])
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Commit(number, body["fence"], body["step"], body["folder"], files, body["record"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return BrokenRecord(number, "its commit record is damaged (not what forerun writes)")
