"""Metrics, ledger and summary next to the checkpoints, if `checkpoint.folder` puts these outside of the run's folder.

A machine that has only the checkpoints can then resume the run with everything that it has recorded. Each checkpoint
names the parts of the metrics and of the ledger up to its step (`forerun.checkpoint.parts`), and their digest
(`forerun.journal.Seal`). The summary of a finished run is stored once per owner of the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.parts import FOLDER, Attach, Part, Recorded, read_parts, recorded_parts, write_parts
from forerun.checkpoint.patience import Patience
from forerun.checkpoint.place import Place, place_of
from forerun.checkpoint.store import Store
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write, atomic_writer
from forerun.journal import Journal, Seal, matching_seals
from forerun.loop.folder import RunFolder
from forerun.loop.saved_files import LEDGER, METRICS, TRACKED, SavedFiles

Tell = Callable[[str], None]

_SUMMARY = re.compile(r"summary-(\d+)\.json")
_LOST = (OSError, ValueError, TypeError)  # what is missing, cut off or damaged in a place


class StoredFiles:
    """Adds the journals of a run to its checkpoints.

    Args:
      folder: the run's folder.
      before: what the checkpoint that the run resumes from recorded.
      journals: the run's journals, as they were opened. A journal that is what `before` says continues its stored
        parts. One that lost lines is stored from its start.
    """

    def __init__(self, folder: RunFolder, before: SavedFiles, journals: Mapping[str, Journal | None]) -> None:
        self._folder = folder
        self._journals = {name: journal for name, journal in journals.items() if journal is not None}
        self._parts: dict[str, list[Part]] = {}
        for name, journal in self._journals.items():
            seals = before.seals(name)
            if seals and journal.seal(seals[-1].step) == seals[-1]:
                self._parts[name] = _parts_of(before.records[-1], name)

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records beside the parts: the run's token for trackers, if it has one."""
        try:
            return {TRACKED: str(json.loads(self._folder.tracked.read_bytes())["token"])}
        except (*_LOST, KeyError):
            return {}

    def attach(self) -> Attach:
        """Return the function that stores the journals as they are now. The save calls it in its own thread."""
        contents = {name: journal.snapshot() for name, journal in self._journals.items()}

        def attach(place: Place, folder: str) -> Recorded:
            written = {
                name: write_parts(place, folder, name, content, self._parts.get(name, []))
                for name, content in contents.items()
            }
            self._parts.update(written)
            return written

        return attach


def restore_files(checkpoints: Path | str, folder: RunFolder, tell: Tell) -> None:
    """Restore the files of a run that are missing here, or are not what the newest checkpoint recorded.

    A file that differs is kept under another name. Checkpoints in the run's own folder have no copies: nothing happens.
    """
    if isinstance(checkpoints, Path):
        return
    place = place_of(checkpoints, Patience(), tell)
    commits = place.patiently(Log(place).commits)
    if not commits:
        return
    newest = commits[-1]
    folder.path.mkdir(parents=True, exist_ok=True)
    restored = [
        path.name
        for name, path in ((METRICS, folder.metrics), (LEDGER, folder.ledger))
        if _restore_journal(place, newest, name, path, tell)
    ]
    restored += [path.name for path in (_restore_summary(place, newest, folder, tell),) if path]
    if _restore_token(newest, folder):
        restored.append(folder.tracked.name)
    if restored:
        tell(f"{folder.path}: {', '.join(restored)} restored from {place.address}, up to step {newest.step}")


def read_summary(folder: RunFolder, step: int) -> dict[str, Any] | None:
    """Return the summary of a run that has ended at `step`, or None if it is missing or of another step."""
    try:
        return _summary(folder.summary.read_bytes(), step)
    except _LOST:
        return None


def store_summary(checkpoints: Path | str, store: Store, folder: RunFolder) -> None:
    """Store the summary with checkpoints that are not in the run's folder, unless it is stored already.

    Raises:
      StorageError: the place cannot be written. The same command tries again.
    """
    if isinstance(checkpoints, Path):
        return
    place, content = store.reader.place, folder.summary.read_bytes()
    try:
        place.patiently(lambda: _store_summary(place, store.fence, content))
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the summary of the run was not stored in {place.address}",
            why=str(error.strerror or error),
            fix="free space there or fix its permissions, then run the same command again",
        ) from error


def _store_summary(place: Place, fence: int, content: bytes) -> None:
    found = _summaries(place)
    if found and place.read(found[-1]) == content:
        return
    name = f"{FOLDER}/summary-{fence:012d}.json"
    if not place.create(name, content):
        raise FileExistsError(0, "another process has stored it", name)
    for older in found:
        place.remove(older)


def _summaries(place: Place) -> list[str]:
    """Return the names of the stored summaries, by ascending owner."""
    return [f"{FOLDER}/{name}" for name in sorted(place.names(FOLDER)) if _SUMMARY.fullmatch(name)]


def _restore_journal(place: Place, commit: Commit, name: str, path: Path, tell: Tell) -> bool:
    """Return whether the file was written."""
    if not commit.record.get(name):
        return False
    seal = Seal(**commit.record[name])
    if path.exists() and matching_seals(path, [seal]):
        return False
    parts = _parts_of(commit.record, name)
    if not parts:  # an older version saved it, or the file was empty
        return False
    try:
        return place.patiently(lambda: _write_journal(place, parts, seal, path, tell))
    except UserError:
        raise
    except _LOST as error:
        tell(f"{path}: its copy in {place.address} cannot be used ({error})")
        return False


def _write_journal(place: Place, parts: list[Part], seal: Seal, path: Path, tell: Tell) -> bool:
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
            aside = _free_name(path)
            path.rename(aside)
            tell(f"{path}: it is not what the checkpoint of step {seal.step} recorded, and is now {aside.name}")
        restored.replace(path)
    finally:
        restored.unlink(missing_ok=True)
    return True


def _begins_with(whole: Path, beginning: Path) -> bool:
    """Return whether `whole` has all of `beginning`, so that nothing is lost without the latter."""
    size = beginning.stat().st_size
    if size > whole.stat().st_size:
        return False
    with beginning.open("rb") as one, whole.open("rb") as other:
        return all(block == other.read(len(block)) for block in iter(lambda: one.read(1 << 20), b""))


def _restore_summary(place: Place, commit: Commit, folder: RunFolder, tell: Tell) -> Path | None:
    """Write the stored summary of the newest step, if there is one and the local file is another."""
    found = place.patiently(lambda: _summaries(place))
    content = place.patiently(lambda: place.read(found[-1])) if found else b""
    if not found or _summary(content, commit.step) is None:
        return None
    if folder.summary.exists():
        if folder.summary.read_bytes() == content:
            return None
        aside = _free_name(folder.summary)
        folder.summary.rename(aside)
        tell(f"{folder.summary}: it is not what the run stored with its checkpoints, and is now {aside.name}")
    atomic_write(folder.summary, content)
    return folder.summary


def _restore_token(commit: Commit, folder: RunFolder) -> bool:
    """Write the run's token for trackers, so that a tracker adds to the run that it has."""
    token = commit.record.get(TRACKED)
    if not isinstance(token, str) or folder.tracked.exists():
        return False
    atomic_write(folder.tracked, json.dumps({"token": token, "steps": {}}) + "\n")
    return True


def _summary(content: bytes, step: int) -> dict[str, Any] | None:
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == step else None


def _parts_of(record: Mapping[str, Any], name: str) -> list[Part]:
    try:
        return recorded_parts(record, name)
    except _LOST:
        return []


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    return other
