"""The process of a keeper: it controls the run to its end, and then deletes its own machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.cloud.control.actions import Action, EndRun, Pause
from forerun.cloud.control.controller import Controller, JobDelivery, holder_name
from forerun.cloud.control.ledger import RunLedger, ledger_of
from forerun.cloud.control.run_report import event_text, state_text
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.google.clock import elapsed_seconds
from forerun.cloud.provider import FAILURES, Provider, failure_text
from forerun.cloud.record.entries import ENDED_FAILED, CloudRun, LeaseEntry, Name, Time, Word
from forerun.cloud.record.read_entry import read_entry, require_undamaged, write_entry
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.ssh.delivery import SshDelivery, secrets_in
from forerun.errors import UserError
from forerun.reporter import LogReporter, Reporter


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper must know.

    Attributes:
      run: what the user has agreed to. The keeper does not read it from the bucket, where it may be changed.
      resource: the name of the keeper itself, which it deletes at the end.
      overrides: the keys of the job whose local files are at another path on the keeper.
      since: when the user started or resumed the run, in the cloud's time.
    """

    run: CloudRun
    project: Word | None
    resource: Name
    zone: Name
    overrides: tuple[str, ...] = ()
    since: Time = 0.0

    def to_json(self) -> bytes:
        return write_entry(self)


def read_keeper_settings(file: Path) -> KeeperSettings:
    return require_undamaged(read_entry(KeeperSettings, str(file), file.read_bytes()))


HOLDER = "keeper"  # the first word of a keeper's name in the lease
RETRY_SECONDS = 60.0


class KeeperLog:
    """Writes one line for each event, and for each new state."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._last = reporter, ""

    def show(self, view: ControlView, action: Action) -> None:
        event = event_text(action)
        if event is not None:
            self._reporter.info(event)
        elif isinstance(action, Pause) and action.why != self._last:
            self._last = action.why
            self._reporter.info(state_text(view))

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        if lease.holder != self._last:
            self._last = lease.holder
            self._reporter.info(f"{lease.holder} controls the run")

    def trouble(self, message: str) -> None:
        self._reporter.info(message)


def run_keeper(
    settings: KeeperSettings,
    providers: Mapping[str, Provider],
    delivery: JobDelivery,
    reporter: Reporter,
    sleep: Callable[[float], None] = time.sleep,
    files: RunFiles | None = None,
    ledger: RunLedger | None = None,
    elapsed: Callable[[], float] = elapsed_seconds,
) -> EndRun:
    """Control the run until its end, and delete the keeper's own machine."""
    controller = Controller(
        settings.run,
        files or RunFiles(settings.run.folder),
        providers,
        delivery,
        KeeperLog(reporter),
        f"{HOLDER}:{holder_name()}",
        settings.since,
        ledger,
        elapsed,
    )
    try:
        _, end = controller.follow(sleep)
        assert end is not None
    except UserError as error:  # nothing is rented but the keeper
        reporter.info(str(error))
        end = EndRun(ENDED_FAILED, error.what)
    while True:
        try:
            reporter.info(f"deleting {settings.resource} in {settings.zone}")
            providers["compute"].delete(settings.resource, settings.zone)
            return end
        except FAILURES as error:
            reporter.info(failure_text(error))
            sleep(RETRY_SECONDS)


def start_keeper_process(settings_file: Path, state_folder: Path) -> int:
    """Run the keeper of this machine."""
    from forerun.cloud.providers import GOOGLE, provider_named
    from forerun.cloud.ssh.keys import identity_of, store_identity

    settings = read_keeper_settings(settings_file)
    store_identity(settings.run.folder, (state_folder / "secret").read_bytes())
    providers = {name: provider_named(name, settings.project) for name in GOOGLE}
    secrets = secrets_in(os.environ)  # systemd reads them from the file `environment` of this machine
    reporter = LogReporter()
    delivery = SshDelivery(
        state_folder / "job",
        identity_of(settings.run.folder),
        settings.project,
        reporter,
        secrets,
        overrides=settings.overrides,
    )
    run_keeper(settings, providers, delivery, reporter, ledger=ledger_of(settings.run.folder))
    return 0
