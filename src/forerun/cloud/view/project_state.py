"""What exists in a project: the resources of all providers, and the records of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from forerun.cloud import labels
from forerun.cloud.provider import ApiDisabled, CloudUnavailable, Provider, Resource, ZonesUnreachable
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.snapshot import RecordSnapshot, read_snapshot
from forerun.errors import StorageError, UserError

CONCURRENT_RECORDS = 8


@dataclass(frozen=True)
class ProjectState:
    """Everything that forerun created, at one moment.

    Attributes:
      resources: what the providers list.
      snapshots: the records of runs by their bucket folder.
      unread: why the record of a folder cannot be read, by folder.
      errors: why a provider cannot list its resources. The list is incomplete then.
      now: the time of the cloud's clock.
    """

    resources: tuple[Resource, ...]
    snapshots: dict[str, RecordSnapshot]
    unread: dict[str, str]
    errors: tuple[UserError, ...]
    now: float


def read_project(providers: Sequence[Provider], known: Iterable[str], now: float) -> ProjectState:
    """Read the resources of all providers, and the records of the runs that they name or that are known.

    Args:
      providers: those of the project.
      known: folders of other runs.
      now: the time to use if no provider answers.
    """
    resources, errors = list_resources(providers)
    moment = cloud_time(providers, now)
    named = {one.metadata[labels.FOLDER] for one in resources if one.metadata.get(labels.FOLDER)}
    snapshots: dict[str, RecordSnapshot] = {}
    unread: dict[str, str] = {}
    wanted = sorted(named.union(known))
    with ThreadPoolExecutor(CONCURRENT_RECORDS) as pool:
        for folder, found in zip(wanted, pool.map(_snapshot, wanted), strict=True):
            if isinstance(found, RecordSnapshot):
                snapshots[folder] = found
            elif folder in named:
                unread[folder] = found or "it has no file cloud/run.json"
    return ProjectState(tuple(resources), snapshots, unread, tuple(errors), moment)


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
    return resources, errors if len(disabled) < len(providers) else disabled


def unavailable(provider: str, error: CloudUnavailable) -> StorageError:
    """Return the error for an API that does not answer after several tries."""
    return StorageError(
        "E-CLOUD-067",
        f"the API of the provider {provider} does not answer",
        why=str(error),
        fix="run the same command again later; machines that exist are still billed, up to their deadlines",
    )


def cloud_time(providers: Sequence[Provider], fallback: float) -> float:
    """Return the time of the first provider that answers, else `fallback`."""
    for provider in providers:
        with suppress(UserError, CloudUnavailable):
            return provider.now()
    return fallback


def _snapshot(folder: str) -> RecordSnapshot | str | None:
    try:
        return read_snapshot(RunFiles(folder))
    except UserError as error:
        return f"{error.what} [{error.code}]"
    except (OSError, ValueError) as error:
        return str(error)
