"""What exists in a project: the resources of all providers, and the records of their runs."""

from __future__ import annotations

import os.path
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from forerun.cloud import labels
from forerun.cloud.provider import ApiDisabled, CloudUnavailable, Provider, Resource, ZonesUnreachable
from forerun.cloud.record.read_entry import DamagedEntry
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.ssh.ssh_provider import PROVIDER, SshProvider
from forerun.cloud.view.snapshot import RecordSnapshot, read_snapshot
from forerun.errors import StorageError, UserError

CONCURRENT_CALLS = 8
RECORD_SECONDS = 60.0  # of the reads of all records; a bucket may never answer


@dataclass(frozen=True)
class ProjectState:
    """Everything that forerun created, at one moment.

    Attributes:
      providers: those that were asked: the project's ones, and the existing machines of known runs.
      resources: what the providers list.
      snapshots: the records of runs by their bucket folder.
      unread: why the record of a folder cannot be read, by folder: a reason, or its damaged `run.json`.
      errors: why a provider cannot list its resources. The list is incomplete then.
      no_access: why the providers of the project cannot be asked at all; part of `errors`.
      now: the time of the cloud's clock.
    """

    providers: tuple[Provider, ...]
    resources: tuple[Resource, ...]
    snapshots: dict[str, RecordSnapshot]
    unread: dict[str, str | DamagedEntry]
    errors: tuple[UserError, ...]
    no_access: UserError | None
    now: float


def read_project(
    providers: Callable[[], Sequence[Provider]],
    known: Sequence[str],
    now: float,
    record_seconds: float = RECORD_SECONDS,
) -> ProjectState:
    """Read the resources of all providers, and the records of the runs that they name or that are known.

    Args:
      providers: returns those of the project, or raises UserError without credentials. That is no error for users whose
        known runs all use existing machines.
      known: folders of runs that may have no resources.
      now: the time to use if no provider answers.
      record_seconds: how long all buckets together may delay the result, twice.
    """
    found, unread = _read_records(known, record_seconds)
    no_access = None
    rented: Sequence[Provider] = ()
    try:
        rented = providers()
    except UserError as error:
        if not found or any(not _uses_existing_machines(one) for one in found.values()):
            no_access = error
    every = (*rented, *_existing_machines(found.values()))
    resources, unlisted = list_resources(every)
    named = {folder for resource in resources if (folder := resource.metadata.get(labels.FOLDER))}
    more, more_unread = _read_records(sorted(named - set(found) - set(unread)), record_seconds)
    # A known folder that has no record any more is no problem, unless resources name it.
    unread = {folder: why for folder, why in unread.items() if folder in named or isinstance(why, DamagedEntry)}
    return ProjectState(
        providers=every,
        resources=tuple(resources),
        snapshots={**found, **more},
        unread={**unread, **more_unread},
        errors=(*unlisted, *(() if no_access is None else (no_access,))),
        no_access=no_access,
        now=cloud_time(every, now),
    )


def list_resources(providers: Sequence[Provider]) -> tuple[list[Resource], list[UserError]]:
    """Return what exists in all providers, and the errors of those that cannot be asked.

    An API that is not enabled has no resources. It is an error only if no API is enabled: the project may be wrong.
    """
    resources: list[Resource] = []
    errors: list[UserError] = []
    disabled: list[UserError] = []
    for provider in providers:
        try:
            resources += provider.list()
        except ApiDisabled as error:
            disabled.append(error)
        except UserError as error:
            errors.append(error)
        except CloudUnavailable as error:
            resources += error.resources if isinstance(error, ZonesUnreachable) else ()
            errors.append(unavailable(provider.name, error))
    return resources, disabled if providers and len(disabled) == len(providers) else errors


def unavailable(provider: str, error: CloudUnavailable) -> StorageError:
    """Return the error for an API that does not answer after several tries."""
    return StorageError(
        "E-CLOUD-067",
        f"the API of the provider {provider} does not answer",
        why=str(error),
        fix="run the same command again later; machines that exist are still billed, up to their deadlines",
    )


@contextmanager
def api_errors(providers: Iterable[str]) -> Iterator[None]:
    """Turn CloudUnavailable into an error that the user sees."""
    try:
        yield
    except CloudUnavailable as error:
        raise unavailable(" or ".join(providers), error) from error


def cloud_time(providers: Sequence[Provider], fallback: float) -> float:
    """Return the time of the first provider that answers, else `fallback`."""
    for provider in providers:
        with suppress(UserError, CloudUnavailable):
            return provider.now()
    return fallback


def _read_records(
    folders: Sequence[str], seconds: float
) -> tuple[dict[str, RecordSnapshot], dict[str, str | DamagedEntry]]:
    """Return the records of runs by their folder, and why others cannot be read."""
    answers = bounded_calls(_snapshot, folders, seconds)
    records = {folder: answers.get(folder, f"no answer within {seconds:.0f} s") for folder in folders}
    return (
        {folder: record for folder, record in records.items() if isinstance(record, RecordSnapshot)},
        {folder: record for folder, record in records.items() if not isinstance(record, RecordSnapshot)},
    )


def _uses_existing_machines(snapshot: RecordSnapshot) -> bool:
    return all(option.provider == PROVIDER for option in snapshot.run.options)


def _existing_machines(snapshots: Iterable[RecordSnapshot]) -> tuple[Provider, ...]:
    """Return the provider of existing machines that runs use at present. Their zone is the file of machines."""
    files = {
        entry.option.zone
        for snapshot in snapshots
        for entry in snapshot.open_attempts
        if entry.option.provider == PROVIDER and os.path.isfile(entry.option.zone)
    }
    return (SshProvider(sorted(files)),) if files else ()


def _snapshot(folder: str) -> RecordSnapshot | DamagedEntry | str:
    try:
        return read_snapshot(RunFiles(folder)) or "it has no file cloud/run.json"
    except UserError as error:
        return f"{error.what} [{error.code}]"
    except (OSError, ValueError) as error:
        return str(error)


K = TypeVar("K")
V = TypeVar("V")


def bounded_calls(call: Callable[[K], V], arguments: Iterable[K], seconds: float) -> dict[K, V]:
    """Return the results of `call` by its argument, without the calls that have not ended after `seconds`.

    The threads are daemons: unlike those of an executor, they do not delay the exit of the process. `call` must not
    raise an error; a call that does is absent from the result.
    """
    waiting: SimpleQueue[K] = SimpleQueue()
    for argument in dict.fromkeys(arguments):
        waiting.put(argument)
    results: dict[K, V] = {}
    is_late = threading.Event()

    def work() -> None:
        while not is_late.is_set():
            try:
                argument = waiting.get_nowait()
            except Empty:
                return
            results[argument] = call(argument)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(CONCURRENT_CALLS, waiting.qsize()))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    is_late.set()
    return dict(results)
