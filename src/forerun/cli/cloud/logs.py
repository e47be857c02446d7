"""`forerun logs`: follow the log of a cloud run."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import files_of
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Count, Project, Value, host_index

if TYPE_CHECKING:
    from forerun.cloud.record.host_log import LogReader
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.view.snapshot import RecordSnapshot

POLL_SECONDS = 2.0
STATE_SECONDS = 10.0  # between two reads of the record: whether the run has a new attempt, or has ended
LONGEST_PAUSE_SECONDS = 30.0
# A controller renews its lease within a minute. A run without a slice and without a controller has no further log.
LEASE_SECONDS = 120.0


@options_of("forerun.verbs.cloud_runs:fetch_run", omit=("to",))
def logs(
    name: str,
    *,
    host: Annotated[int, Value("N", host_index)] = 0,
    attempt: Count | None = None,
    no_follow: bool = False,
    project: Project | None = None,
) -> int:
    """Print the log of a host, and follow it until the run ends.

    Args:
      host: index of the host
      attempt: number of the attempt (default: the newest)
      no_follow: print the log up to now, and end
    """
    files = files_of(name, project)
    snapshot = _snapshot(files)
    newest = snapshot.newest
    chosen = attempt or (newest.number if newest else None)
    if chosen is None and no_follow:
        LineReporter(sys.stderr).info("the run has no slice yet")
        return 0
    _require(snapshot, chosen, host)
    if no_follow:
        assert chosen is not None
        print_new(_open_log(files, snapshot, chosen, host))
        return 0
    _follow(files, snapshot, chosen, host, only=attempt is not None)
    return 0


def _follow(files: RunFiles, snapshot: RecordSnapshot, attempt: int | None, host: int, *, only: bool) -> None:
    """Print the log of an attempt and of those that follow it, until the run ends; with `only`, of one attempt."""
    reader = None
    lease, renewed = snapshot.lease, time.monotonic()
    while True:
        if reader is None and attempt is not None:
            reader = _open_log(files, snapshot, attempt, host)
        if snapshot.lease != lease or snapshot.open_attempts:
            lease, renewed = snapshot.lease, time.monotonic()
        is_abandoned = time.monotonic() - renewed > LEASE_SECONDS
        is_over = attempt in snapshot.ends if only else snapshot.is_over or is_abandoned
        if reader is not None:
            print_new(reader)
        newest = snapshot.newest
        if not only and newest is not None and newest.number != attempt:
            attempt, reader = newest.number, None
            continue
        if is_over:
            LineReporter(sys.stderr).info(_end_text(snapshot))
            return
        snapshot = _print_until_next_state(files, reader)


def _print_until_next_state(files: RunFiles, reader: LogReader | None) -> RecordSnapshot:
    """Print what is added, then return the new state of the run. Outages only delay it, such as those of a laptop."""
    from forerun.errors import StorageError

    until, pause = time.monotonic() + STATE_SECONDS, POLL_SECONDS
    while True:
        time.sleep(pause)
        try:
            if reader is not None:
                print_new(reader)
            if time.monotonic() >= until:
                return _snapshot(files)
            pause = POLL_SECONDS
        except BrokenPipeError:
            raise
        except (StorageError, OSError) as error:
            if pause == POLL_SECONDS:
                LineReporter(sys.stderr).info(f"the bucket does not answer; trying again: {error}")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def print_new(reader: LogReader) -> None:
    """Print what was added to a log. It is the output of the hosts, without control sequences."""
    if content := reader.read():
        print(content.decode("utf-8", "replace"), end="", flush=True)


def _open_log(files: RunFiles, snapshot: RecordSnapshot, attempt: int, host: int) -> LogReader:
    from forerun.cloud.record.host_log import LogReader

    option = snapshot.attempts[attempt].option
    LineReporter(sys.stderr).info(
        f"--- attempt {attempt}: {option.slice} in {option.zone} ({option.capacity}), host {host}"
    )
    return LogReader(files, attempt, host)


def _snapshot(files: RunFiles) -> RecordSnapshot:
    from forerun.cloud.record.read_entry import require_undamaged
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
    return require_undamaged(found)


def _require(snapshot: RecordSnapshot, attempt: int | None, host: int) -> None:
    from forerun.errors import UserError

    if attempt is None:
        return
    entry = snapshot.attempts.get(attempt)
    if entry is None:
        raise UserError(
            "E-CLOUD-076",
            f"the run {snapshot.run.name} has no attempt {attempt}",
            why=f"it has {len(snapshot.attempts)} attempts",
            fix="omit --attempt for the newest one",
        )
    if host >= entry.option.hosts:
        raise UserError(
            "E-CLOUD-077",
            f"the slice {entry.option.slice} of the run {snapshot.run.name} has no host {host}",
            why=f"it has {entry.option.hosts} hosts; the first has the index 0",
            fix=f"choose one of them, for example --host {entry.option.hosts - 1}",
        )


def _end_text(snapshot: RecordSnapshot) -> str:
    if snapshot.finished is not None:
        return f"--- the run has finished; forerun fetch {snapshot.run.name} downloads its results"
    if snapshot.ends:
        end = snapshot.ends[max(snapshot.ends)]
        return f"--- the slice is deleted: {end.reason}{f' ({end.detail})' if end.detail else ''}"
    return "--- the run has no slice and no controller"
