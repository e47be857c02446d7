"""The begin of a run, or of its resumption by the same command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.cloud import labels
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.control.observation import RunObserver
from forerun.cloud.provider import Provider
from forerun.cloud.record.entries import CloudRun
from forerun.cloud.record.read_entry import DamagedEntry, undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import UserError


def with_cap(files: RunFiles, wanted: CloudRun, ledger: RunLedger, *, max_usd_given: bool) -> CloudRun:
    """Return a run with the cap that will hold: that of the user, else that of the run that is resumed.

    The cap of a resumed run is the lower one of the record and of this machine's ledger: the record may be forged.

    Raises:
      UserError: The run exists, and its cap is not known.
    """
    recorded = files.run()
    if max_usd_given or recorded is None or wanted.max_usd is None:
        return wanted
    known = [one.max_usd for one in (undamaged(recorded), ledger.agreed) if one is not None and one.max_usd is not None]
    if not known:
        reason = recorded.reason if isinstance(recorded, DamagedEntry) else "max_usd is null"
        raise UserError(
            "E-CLOUD-095",
            f"the cap of the run {wanted.name} is not known",
            why=f"{files.files.address}/run.json is damaged: {reason}",
            fix="give the cap for all its attempts together, for example: --max-usd 20",
        )
    return replace(wanted, max_usd=min(known))


def usd_so_far(
    files: RunFiles, run: CloudRun, ledger: RunLedger, providers: Mapping[str, Provider], now: float
) -> float:
    """Return what a run has cost until now, as its controller will count it. Change nothing."""
    observer = RunObserver(replace(run, keeper_spent_usd=_keepers_usd(files, ledger, now)), files, ledger.copy())
    observer.read(providers, now)
    return observer.view(now).cost_usd


def begin_run(
    files: RunFiles,
    wanted: CloudRun,
    providers: Mapping[str, Provider],
    now: float,
    *,
    max_usd_given: bool = True,
    ledger: RunLedger | None = None,
) -> CloudRun:
    """Create the record of a run, or update that of a run with the same job. Return what the user has agreed to.

    A stop of the run is withdrawn: the user wants it to continue. A run that exists keeps its cap unless the user gives
    one. The controller uses what this function returns. The record is for others.

    Raises:
      UserError: Another job has this name, in this bucket folder or in the project; or the cap is not known.
    """
    ledger = RunLedger() if ledger is None else ledger
    _require_own_name(wanted, providers)
    wanted = with_cap(files, wanted, ledger, max_usd_given=max_usd_given)
    wanted = replace(wanted, created_at=now, keeper_at=now if wanted.keeper else None)
    earlier = _earlier_run(files, ledger)
    if earlier is not None:
        if (earlier.job, tuple(earlier.arguments)) != (wanted.job, tuple(wanted.arguments)):
            raise UserError(
                "E-CLOUD-061",
                f"the run {wanted.name} exists with another job",
                why=f"{files.files.address}/run.json was created from another job file or other arguments",
                fix="give this job another name: name=NEW; or resume the run with its own job file and arguments",
            )
        wanted = replace(wanted, created_at=earlier.created_at)
    wanted = replace(wanted, keeper_spent_usd=_keepers_usd(files, ledger, now))
    if files.run() != wanted and not files.create_run(wanted):
        files.replace_run(wanted)
    if files.stop() is not None:
        files.withdraw_stop()
    ledger.agree(wanted)
    return wanted


def _earlier_run(files: RunFiles, ledger: RunLedger) -> CloudRun | None:
    """Return the run in the record, or as this machine knows it if the record is damaged; None if there is none."""
    recorded = files.run()
    return ledger.agreed if isinstance(recorded, DamagedEntry) else recorded


def _keepers_usd(files: RunFiles, ledger: RunLedger, now: float) -> float:
    """Return what the earlier keepers of a run cost. The record alone may tell too little."""
    runs = [run for run in (undamaged(files.run()), ledger.agreed) if run is not None]
    return max((_keeper_spent_usd(files, run, now) for run in runs), default=0.0)


def _keeper_spent_usd(files: RunFiles, earlier: CloudRun, now: float) -> float:
    """Return what the earlier keepers of a run cost. The last one ended with the last attempt."""
    if earlier.keeper_at is None:
        return earlier.keeper_spent_usd
    ends = [undamaged(files.end(number)) for number in files.attempts()]
    last = now if None in ends else max((end.at for end in ends if end is not None), default=now)
    return earlier.keeper_spent_usd + earlier.keeper_usd_per_hour * max(last - earlier.keeper_at, 0.0) / 3600


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
