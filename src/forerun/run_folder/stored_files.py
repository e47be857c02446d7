"""What checkpoints record about the files of a run, and copies of these files with checkpoints in other places.

A resumed run compares its files with the records of its checkpoints (`SavedFiles`). Checkpoints outside of the run's
folder are stored with copies (`StoredFiles`).

A machine that has only the checkpoints can then resume the run with all its records. Each checkpoint names the parts of
the metrics, ledger and events up to its step (`forerun.checkpoint.parts`), and their digest (`forerun.journal.Seal`).
The summary of a finished run is stored once per owner of the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.parts import FOLDER, Attach, FilePart, Recorded, read_parts, recorded_parts, write_parts
from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write, atomic_writer
from forerun.journal import Journal, Seal, Snapshot, matching_seals
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder, free_name
from forerun.safe_text import redacted_tree
from forerun.storage.folder import Folder, create_once
from forerun.storage.open_folder import folder_at
from forerun.storage.retries import RetrySchedule
from forerun.track.event_log import EventLog

# Keys of a checkpoint's record.
METRICS, LEDGER, EVENTS, SKIPS, JOB, TRACKED = "metrics", "ledger", "events", "skips", "job", "tracked"

_SUMMARY = re.compile(r"summary-(\d+)\.json")
_LOST = (OSError, ValueError, TypeError)  # raised for files that are missing, truncated or damaged


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


class StoredFiles:
    """Adds the journals of a run to its checkpoints.

    Args:
      folder: the run's folder.
      before: what the checkpoint that the run resumes from recorded.
      journals: the run's open journals, by name. If a journal agrees with `before`, only new parts are stored. If it
        has lost lines, it is stored again from its start.
      events: the run's open log of events. It has grown since the checkpoint, so the first save stores the whole
        file.
    """

    def __init__(
        self,
        folder: RunFolder,
        before: SavedFiles,
        journals: Mapping[str, Journal | None],
        events: EventLog | None = None,
    ) -> None:
        self._folder, self._events = folder, events
        self._journals = {name: journal for name, journal in journals.items() if journal is not None}
        self._parts: dict[str, list[FilePart]] = {}
        for name, journal in self._journals.items():
            seals = before.seals(name)
            if seals and journal.seal(seals[-1].step) == seals[-1]:
                self._parts[name] = _parts_of(before.records[-1], name)

    def record(self, step: int) -> dict[str, Any]:
        """Return entries for the checkpoint's record: the seal of the events, and the run's token for trackers."""
        seal = None if self._events is None else self._events.seal(step)
        entries: dict[str, Any] = {} if seal is None else {EVENTS: vars(seal)}
        try:
            return entries | {TRACKED: str(json.loads(self._folder.tracked.read_bytes())["token"])}
        except (*_LOST, KeyError):
            return entries

    def attach(self) -> Attach:
        """Return a function that stores the files as they are now. A save calls it in the background."""
        contents: dict[str, Snapshot] = {name: journal.snapshot() for name, journal in self._journals.items()}
        if self._events is not None and (snapshot := self._events.snapshot()) is not None:
            contents[EVENTS] = snapshot

        def attach(place: Folder, folder: str) -> Recorded:
            written = {
                name: write_parts(place, folder, name, content, self._parts.get(name, []))
                for name, content in contents.items()
            }
            self._parts.update(written)
            return written

        return attach


def restore_files(checkpoints: Path | str, folder: RunFolder, reporter: Reporter) -> None:
    """Restore the files of a run that are missing on this machine or differ from the newest checkpoint's record.

    A file that differs is renamed and not deleted. For checkpoints in the run's folder, which have no copies, this
    function does nothing.
    """
    if isinstance(checkpoints, Path):
        return
    place = folder_at(checkpoints, RetrySchedule(), reporter)
    commits = place.with_retries(Log(place).commits)
    if not commits:
        return
    newest = commits[-1]
    folder.path.mkdir(parents=True, exist_ok=True)
    restored = [
        path.name
        for name, path in ((METRICS, folder.metrics), (LEDGER, folder.ledger), (EVENTS, folder.events))
        if _restore_journal(place, newest, name, path, reporter)
    ]
    restored += [path.name for path in (_restore_summary(place, newest, folder, reporter),) if path]
    if _restore_token(newest, folder):
        restored.append(folder.tracked.name)
    if restored:
        reporter.warn(f"{folder.path}: {', '.join(restored)} restored from {place.address}, up to step {newest.step}")


def read_summary(folder: RunFolder, step: int) -> dict[str, Any] | None:
    """Return the summary of a run that ended at `step`, or None if it is missing, damaged or of another step."""
    try:
        return _summary(folder.summary.read_bytes(), step)
    except _LOST:
        return None


def store_summary(checkpoints: Path | str, store: CheckpointStore, folder: RunFolder) -> None:
    """Store the summary with checkpoints that are outside of the run's folder, unless it is stored already.

    Raises:
      StorageError: the place cannot be written. The user can run the same command again.
    """
    if isinstance(checkpoints, Path):
        return
    place, content = store.reader.storage, folder.summary.read_bytes()
    try:
        place.with_retries(lambda: _store_summary(place, store.fence, content))
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            "E-RUN-038",
            f"the summary of the run was not stored in {place.address}",
            why=str(error.strerror or error),
            fix="free space there or fix its permissions, then run the same command again",
        ) from error


def _store_summary(place: Folder, fence: int, content: bytes) -> None:
    found = _summaries(place)
    if found and place.read(found[-1]) == content:
        return
    name = f"{FOLDER}/summary-{fence:012d}.json"
    if not create_once(place, name, content):
        raise FileExistsError(0, "another process has stored it", name)
    for older in found:
        place.remove(older)


def _summaries(place: Folder) -> list[str]:
    """Return the names of the stored summaries, oldest owner of the run first."""
    return [f"{FOLDER}/{name}" for name in sorted(place.names(FOLDER)) if _SUMMARY.fullmatch(name)]


def _restore_journal(place: Folder, commit: Commit, name: str, path: Path, reporter: Reporter) -> bool:
    """Restore a journal from its copy, if it differs from the checkpoint's record. Return whether it was written."""
    if not commit.record.get(name):
        return False
    seal = Seal(**commit.record[name])
    if path.exists() and matching_seals(path, [seal]):
        return False
    parts = _parts_of(commit.record, name)
    if not parts:  # the journal was empty
        return False
    try:
        return place.with_retries(lambda: _write_journal(place, parts, seal, path, reporter))
    except UserError:
        raise
    except _LOST as error:
        reporter.warn(f"{path}: its copy in {place.address} cannot be used ({error})")
        return False


def _write_journal(place: Folder, parts: list[FilePart], seal: Seal, path: Path, reporter: Reporter) -> bool:
    """Write the stored parts to `path`, and return True. Raise ValueError if they are not what `seal` records."""
    digest, size = hashlib.sha256(), 0
    restored = path.with_name(f"{path.name}.restored")
    with atomic_writer(restored) as out:
        for block in read_parts(place, parts):
            out.write(block)
            digest.update(block)
            size += len(block)
    try:
        if (size, digest.hexdigest()) != (seal.bytes, seal.sha256):
            raise ValueError("its digest differs from what the checkpoint recorded")
        if path.exists() and not _begins_with(restored, path):
            aside = free_name(path, "replaced")
            path.rename(aside)
            reporter.warn(
                f"{path}: it differs from the checkpoint's record of step {seal.step}, and was renamed to {aside.name}"
            )
        restored.replace(path)
    finally:
        restored.unlink(missing_ok=True)
    return True


def _begins_with(file: Path, prefix: Path) -> bool:
    """Return whether `file` starts with the content of `prefix`, so that `prefix` can be replaced without a loss."""
    size = prefix.stat().st_size
    if size > file.stat().st_size:
        return False
    with prefix.open("rb") as one, file.open("rb") as other:
        return all(block == other.read(len(block)) for block in iter(lambda: one.read(1 << 20), b""))


def _restore_summary(place: Folder, commit: Commit, folder: RunFolder, reporter: Reporter) -> Path | None:
    """Restore the stored summary if it belongs to the newest step. Return its path, or None if nothing was written."""
    found = place.with_retries(lambda: _summaries(place))
    content = place.with_retries(lambda: place.read(found[-1])) if found else b""
    if not found or _summary(content, commit.step) is None:
        return None
    if folder.summary.exists():
        if folder.summary.read_bytes() == content:
            return None
        aside = free_name(folder.summary, "replaced")
        folder.summary.rename(aside)
        reporter.warn(
            f"{folder.summary}: it differs from the copy with the run's checkpoints, and was renamed to {aside.name}"
        )
    atomic_write(folder.summary, content)
    return folder.summary


def _restore_token(commit: Commit, folder: RunFolder) -> bool:
    """Restore the run's token for trackers, so that a tracker continues its run. Return whether it was written."""
    token = commit.record.get(TRACKED)
    if not isinstance(token, str) or folder.tracked.exists():
        return False
    atomic_write(folder.tracked, json.dumps({"token": token, "steps": {}}) + "\n")
    return True


def _summary(content: bytes, step: int) -> dict[str, Any] | None:
    """Return the summary in `content`, or None if it is damaged or not of `step`."""
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == step else None


def _parts_of(record: Mapping[str, Any], name: str) -> list[FilePart]:
    try:
        return recorded_parts(record, name)
    except _LOST:
        return []
