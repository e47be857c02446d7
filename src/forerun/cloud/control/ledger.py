"""What a controller itself has agreed, seen and verified, in a file on its own disk.

Everyone who may write to the bucket can change the record of a run. Limits and costs therefore come from the ledger,
and the record can only add to them. The ledger also keeps them when a controller is started again on the same machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.cloud.record.entries import AttemptEntry, CloudRun, EndEntry, Time
from forerun.cloud.record.read_entry import DamagedEntry, read_entry, write_entry
from forerun.files import atomic_write

SAVE_SECONDS = 30.0  # between two writes of when a slice was seen; every other change is written immediately


@dataclass(frozen=True)
class LedgerAttempt:
    """An attempt as this machine knows it.

    Attributes:
      entry: its price, limit and resource. An entry of the record was checked before (`observation.adopted`).
      ready_at: since when it is billed.
      seen_at: when a controller of this machine saw its slice ready for the last time.
      end: its end, after a controller of this machine has verified that the slice is gone.
      is_foreign: whether the user of this machine did not choose its option.
    """

    entry: AttemptEntry
    ready_at: Time | None = None
    seen_at: Time | None = None
    end: EndEntry | None = None
    is_foreign: bool = False


@dataclass(frozen=True)
class LedgerContent:
    """The file of a ledger. `agreed` is the run with the cap that the user agreed to."""

    agreed: CloudRun | None = None
    attempts: tuple[LedgerAttempt, ...] = ()


class RunLedger:
    """The ledger of one run.

    Several processes of one machine may use it. Each merges its own knowledge with the file before it replaces it.

    Args:
      file: None: keep the ledger in memory only.

    Attributes:
      attempts: by number.
      problem: why the file cannot be read or written, or an empty string. The ledger then works in memory.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.problem = file, ""
        content = self._read()
        self.agreed = content.agreed
        self.attempts = {one.entry.number: one for one in content.attempts}
        self._saved_at: dict[int, float] = {}

    def copy(self) -> RunLedger:
        """Return a ledger with the same content that is never written to a file."""
        copied = RunLedger()
        copied.agreed, copied.attempts = self.agreed, dict(self.attempts)
        return copied

    @property
    def open(self) -> list[LedgerAttempt]:
        """The attempts whose slice may exist."""
        return [one for _, one in sorted(self.attempts.items()) if one.end is None]

    def agree(self, run: CloudRun) -> None:
        """Keep what the user has agreed to."""
        self.agreed = run
        self._write()

    def add(self, *attempts: LedgerAttempt) -> None:
        """Add attempts. One with a number that exists is kept as it is."""
        missing = {one.entry.number: one for one in attempts if one.entry.number not in self.attempts}
        if missing:
            self.attempts |= missing
            self._write()

    def replace_entry(self, entry: AttemptEntry) -> None:
        """Keep another entry of an attempt, for example one with a lower limit."""
        self.attempts[entry.number] = replace(self.attempts[entry.number], entry=entry)
        self._write()

    def bill_from(self, number: int, ready_at: float) -> None:
        """Keep since when an attempt is billed. The earliest time counts."""
        attempt = self.attempts[number]
        if attempt.ready_at is None or ready_at < attempt.ready_at:
            self.attempts[number] = replace(attempt, ready_at=ready_at)
            self._write()

    def see(self, number: int, now: float) -> None:
        """Keep that a slice is ready at present."""
        attempt = self.attempts[number]
        self.attempts[number] = replace(attempt, seen_at=max(now, attempt.seen_at or 0.0))
        if now - self._saved_at.get(number, 0.0) > SAVE_SECONDS:
            self._saved_at[number] = now
            self._write()

    def end(self, number: int, end: EndEntry) -> None:
        """Keep the end of an attempt. The first one counts."""
        attempt = self.attempts[number]
        if attempt.end is None:
            self.attempts[number] = replace(attempt, end=end)
            self._write()

    def _read(self) -> LedgerContent:
        if self.file is None:
            return LedgerContent()
        try:
            content = read_entry(LedgerContent, str(self.file), self.file.read_bytes())
        except FileNotFoundError:
            return LedgerContent()
        except OSError as error:
            self.problem = f"{self.file}: {error.strerror}"
            return LedgerContent()
        if isinstance(content, DamagedEntry):
            self.problem = str(content)
            return LedgerContent()
        return content

    def _write(self) -> None:
        if self.file is None:
            return
        stored = self._read()
        self.agreed = self.agreed or stored.agreed
        for one in stored.attempts:
            attempt = self.attempts.get(one.entry.number)
            self.attempts[one.entry.number] = one if attempt is None else _merged(attempt, one)
        attempts = tuple(one for _, one in sorted(self.attempts.items()))
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self.file, write_entry(LedgerContent(self.agreed, attempts)), 0o600)
        except OSError as error:  # a full disk must not end the control of a slice
            self.problem = f"{self.file}: {error.strerror}"


def ledger_of(folder: str) -> RunLedger:
    """Return the ledger of the run with this bucket folder. It is beside the run's ssh key."""
    from forerun.cloud.ssh.keys import key_folder

    return RunLedger(key_folder() / f"{hashlib.sha256(folder.encode()).hexdigest()[:20]}.ledger.json")


def _merged(one: LedgerAttempt, other: LedgerAttempt) -> LedgerAttempt:
    """Return what two processes know about an attempt: the earliest start, the last sight, and the larger cost."""
    starts = [at for at in (one.ready_at, other.ready_at) if at is not None]
    sights = [at for at in (one.seen_at, other.seen_at) if at is not None]
    ends = [end for end in (one.end, other.end) if end is not None]
    return replace(
        one,
        ready_at=min(starts, default=None),
        seen_at=max(sights, default=None),
        end=max(ends, key=lambda end: end.usd, default=None),
    )
