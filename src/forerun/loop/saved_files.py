"""What the checkpoints of a run record about the files beside them, and what a resumed run compares with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.checkpoint.store import Store
from forerun.config.schema import Job
from forerun.journal import Journal, Seal
from forerun.safe_text import redacted_tree

METRICS, LEDGER, SKIPS, JOB, TRACKED = "metrics", "ledger", "skips", "job", "tracked"  # keys of a checkpoint's record


@dataclass(frozen=True)
class SavedFiles:
    """Records of the checkpoints up to the step that the run resumes from, which is that of the last one.

    A checkpoint of an older version records nothing about the files.
    """

    step: int
    identity: str
    records: tuple[Mapping[str, Any], ...] = ()

    @property
    def complete(self) -> bool:
        return not self.records or JOB in self.records[-1]

    @property
    def skips(self) -> dict[int, str] | None:
        """Return the skipped steps up to `step`, or None if the checkpoint does not have them."""
        if not self.complete:
            return None
        return {step: why for step, why in self.records[-1][SKIPS]} if self.records else {}

    def seals(self, name: str) -> list[Seal]:
        """Return what the checkpoints recorded about a journal; nothing if the newest recorded nothing."""
        if not self.records or not self.records[-1].get(name):
            return []
        return [Seal(**record[name]) for record in self.records if record.get(name)]


def saved_files(store: Store, step: int) -> SavedFiles:
    commits = sorted((c for c in store.reader.commits() if c.step <= step), key=lambda commit: commit.step)
    return SavedFiles(step, store.reader.identity(), tuple(commit.record for commit in commits))


def record_of(
    job: Job, step: int, skips: Mapping[int, str], metrics: Journal | None, ledger: Journal | None
) -> dict[str, Any]:
    """Return what the checkpoint of `step` records about the run's files. Flushes the journals to the disk."""
    journals = {METRICS: metrics, LEDGER: ledger}
    seals = {name: vars(journal.seal(step)) for name, journal in journals.items() if journal is not None}
    # Later steps may have been skipped before a kill. They are not part of this state: the file alone has them.
    skipped = [[number, why] for number, why in sorted(skips.items()) if number <= step]
    return {JOB: redacted_tree(job.model_dump(mode="json")), SKIPS: skipped, **seals}
