"""Records in checkpoints about the run's files. A resumed run compares its files with these records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.journal import Journal, Seal
from forerun.safe_text import redacted_tree

# Keys of a checkpoint's record.
METRICS, LEDGER, EVENTS, SKIPS, JOB, TRACKED = "metrics", "ledger", "events", "skips", "job", "tracked"


@dataclass(frozen=True)
class SavedFiles:
    """The records of the checkpoints up to the step that the run resumes from.

    Args:
      step: the step of the last of these checkpoints, or 0 for a new run.
      identity: the run's identity, from the log of its checkpoints.
      records: one per checkpoint, by ascending step.
    """

    step: int
    identity: str
    records: tuple[Mapping[str, Any], ...] = ()

    @property
    def skips(self) -> dict[int, str]:
        """The skipped steps up to `step` with their reasons."""
        return {step: why for step, why in self.records[-1][SKIPS]} if self.records else {}

    def seals(self, name: str) -> list[Seal]:
        """Return the seals of a journal in the records. The list is empty if the newest checkpoint has none."""
        if not self.records or not self.records[-1].get(name):
            return []
        return [Seal(**record[name]) for record in self.records if record.get(name)]


def saved_files(store: CheckpointStore, step: int) -> SavedFiles:
    """Return the records of the checkpoints up to `step`."""
    commits = sorted((c for c in store.reader.commits() if c.step <= step), key=lambda commit: commit.step)
    return SavedFiles(step, store.reader.identity(), tuple(commit.record for commit in commits))


def record_of(
    job: Job, step: int, skips: Mapping[int, str], metrics: Journal | None, ledger: Journal | None
) -> dict[str, Any]:
    """Return what the checkpoint of `step` records about the run's files. Flushes the journals to the disk."""
    journals = {METRICS: metrics, LEDGER: ledger}
    seals = {name: vars(journal.seal(step)) for name, journal in journals.items() if journal is not None}
    # An earlier process may have skipped later steps before it was killed. They are not part of this checkpoint's
    # state, so only the file of skipped steps contains them.
    skipped = [[number, why] for number, why in sorted(skips.items()) if number <= step]
    return {JOB: redacted_tree(job.model_dump(mode="json")), SKIPS: skipped, **seals}
