"""The begin of a run, or of its resumption by the same command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.cloud import labels
from forerun.cloud.provider import Provider
from forerun.cloud.record.entries import CloudRun
from forerun.cloud.record.read_entry import require_undamaged, undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import UserError


def begin_run(
    files: RunFiles, wanted: CloudRun, providers: Mapping[str, Provider], now: float, *, max_usd_given: bool = True
) -> CloudRun:
    """Create the record of a run, or update that of a run with the same job. Return what is recorded.

    A stop of the run is withdrawn: the user wants it to continue. A run that exists keeps its cap unless the user gives
    one.

    Raises:
      UserError: Another job has this name, in this bucket folder or in the project.
    """
    _require_own_name(wanted, providers)
    wanted = replace(wanted, created_at=now, keeper_at=now if wanted.keeper else None)
    if files.create_run(wanted):
        return wanted
    recorded = files.run()
    assert recorded is not None, "a record is never removed"
    found = require_undamaged(recorded)
    if (found.job, tuple(found.arguments)) != (wanted.job, tuple(wanted.arguments)):
        raise UserError(
            "E-CLOUD-061",
            f"the run {wanted.name} exists with another job",
            why=f"{files.files.address}/run.json was created from another job file or other arguments",
            fix="give this job another name: name=NEW; or resume the run with its own job file and arguments",
        )
    max_usd = wanted.max_usd if max_usd_given else found.max_usd
    updated = replace(
        wanted, created_at=found.created_at, max_usd=max_usd, keeper_spent_usd=_keeper_spent_usd(files, found, now)
    )
    if updated != found:
        files.replace_run(updated)
    if files.stop() is not None:
        files.withdraw_stop()
    return updated


def _keeper_spent_usd(files: RunFiles, found: CloudRun, now: float) -> float:
    """Return what the earlier keepers of a run cost. The last one ended with the last attempt."""
    if found.keeper_at is None:
        return found.keeper_spent_usd
    ends = [undamaged(files.end(number)) for number in files.attempts()]
    last = now if None in ends else max((end.at for end in ends if end is not None), default=now)
    return found.keeper_spent_usd + found.keeper_usd_per_hour * max(last - found.keeper_at, 0.0) / 3600


def _require_own_name(wanted: CloudRun, providers: Mapping[str, Provider]) -> None:
    """Raise an error if a run in another bucket folder has resources with the same names."""
    own = labels.run_label(wanted.name)
    for provider in providers.values():
        for resource in provider.list():
            folder = resource.metadata.get(labels.FOLDER, wanted.folder)
            if resource.labels.get(labels.RUN) == own and folder != wanted.folder:
                raise UserError(
                    "E-CLOUD-062",
                    f"another run in this project is called {wanted.name}",
                    why=f"{resource.name} in {resource.zone} belongs to the run in {folder}",
                    fix=f"give this job another name: name=NEW; or end the other run: forerun stop {folder}",
                )
