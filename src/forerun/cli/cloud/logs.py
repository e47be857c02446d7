"""`forerun logs`: follow the log of a cloud run."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from forerun.cli.cloud.connection import files_of, tell

if TYPE_CHECKING:
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.view.snapshot import RecordSnapshot

POLL_SECONDS = 2.0
STATE_SECONDS = 10.0  # between two looks whether the run has a new attempt or has ended
LONGEST_PAUSE_SECONDS = 30.0


def run(args: argparse.Namespace) -> int:
    from forerun.cloud.view.log_reader import LogReader

    files = files_of(args)
    snapshot = _snapshot(files)
    number = args.attempt or (snapshot.newest.number if snapshot.newest else None)
    if number is None and args.no_follow:
        tell("the run has no slice yet")
        return 0
    _require(snapshot, number, args.host)
    reader = None
    while True:
        if number is not None and reader is None:
            tell(_title(snapshot, number, args.host))
            reader = LogReader(files, number, args.host)
        is_last = args.no_follow or _is_over(snapshot, number, only=args.attempt is not None)
        if reader is not None:
            _print_new(reader)
        if is_last:
            if not args.no_follow:
                tell(_end_text(snapshot))
            return 0
        snapshot = _follow(files, reader, snapshot)
        newest = snapshot.newest
        if args.attempt is None and newest is not None and newest.number != number:
            if reader is not None:
                _print_new(reader)
            number, reader = newest.number, None


def _follow(files: RunFiles, reader: object, snapshot: RecordSnapshot) -> RecordSnapshot:
    """Print what is added until it is time to read the state of the run again. Outages only delay it."""
    from forerun.cloud.view.log_reader import LogReader
    from forerun.errors import StorageError

    until = time.monotonic() + STATE_SECONDS
    pause = POLL_SECONDS
    while True:
        time.sleep(pause)
        try:
            if isinstance(reader, LogReader):
                _print_new(reader)
            if time.monotonic() >= until:
                return _snapshot(files)
            pause = POLL_SECONDS
        except (StorageError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if pause == POLL_SECONDS:
                tell(f"the bucket does not answer; trying again: {error}")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _print_new(reader: object) -> None:
    from forerun.cloud.view.log_reader import LogReader

    assert isinstance(reader, LogReader)
    if content := reader.read():
        print(content.decode("utf-8", "replace"), end="", flush=True)


def _snapshot(files: RunFiles) -> RecordSnapshot:
    from forerun.cloud.view.snapshot import read_snapshot
    from forerun.errors import UserError

    found = read_snapshot(files)
    if found is None:
        raise UserError(
            "E-CLOUD-075",
            f"the record of the run in {files.address} was removed",
            why="cloud/run.json does not exist any more",
            fix="see what exists with forerun ps",
        )
    return found


def _require(snapshot: RecordSnapshot, number: int | None, host: int) -> None:
    from forerun.errors import UserError

    if number is None:
        return
    entry = snapshot.attempts.get(number)
    if entry is None:
        raise UserError(
            "E-CLOUD-076",
            f"the run {snapshot.run.name} has no attempt {number}",
            why=f"it has {len(snapshot.attempts)} attempts",
            fix="omit --attempt for the newest one",
        )
    if host >= entry.option.hosts:
        raise UserError(
            "E-CLOUD-077",
            f"the slice {entry.option.slice} of the run {snapshot.run.name} has no host {host}",
            why=f"its hosts have the indexes 0 to {entry.option.hosts - 1}",
            fix=f"choose one of them, for example --host {entry.option.hosts - 1}",
        )


def _is_over(snapshot: RecordSnapshot, number: int | None, *, only: bool) -> bool:
    return number in snapshot.ends if only else snapshot.is_over


def _title(snapshot: RecordSnapshot, number: int, host: int) -> str:
    option = snapshot.attempts[number].option
    return f"--- attempt {number}: {option.slice} in {option.zone} ({option.capacity}), host {host}"


def _end_text(snapshot: RecordSnapshot) -> str:
    if snapshot.finished is not None:
        return f"--- the run has finished; forerun fetch {snapshot.run.name} downloads its results"
    ends = [snapshot.ends[number] for number in sorted(snapshot.ends)]
    return f"--- the slice is deleted: {ends[-1].reason}" if ends else "--- the run has ended"
