"""The controller: a loop that looks at a run, decides, and carries the decision out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from forerun.cloud import labels
from forerun.cloud.control.actions import (
    Action,
    DeliverJob,
    EndAttempt,
    EndRun,
    Pause,
    RecordReady,
    RequestSlice,
    RequestStop,
    StartAttempt,
)
from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.control.decide import decide
from forerun.cloud.control.lease import Lease
from forerun.cloud.control.observation import RunObserver
from forerun.cloud.control.run_summary import run_summary, write_summary
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.control.slice_request import slice_request
from forerun.cloud.provider import CloudUnavailable, HostAddress, Provider, RequestRefused
from forerun.cloud.record.entries import (
    ENDED_BROKEN,
    ENDED_PREEMPTED,
    ENDED_REFUSED,
    AttemptEntry,
    CloudRun,
    EndEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import require_undamaged, undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import StorageError, UserError

POLL_SECONDS = 5.0
SWEEP_SECONDS = 300.0  # between two searches for slices that nothing needs
SETUP_CHECK_SECONDS = 20.0  # between two looks at the setup of hosts whose agents do not report yet
LONGEST_RETRY_SECONDS = 60.0


class JobDelivery(Protocol):
    """How a job gets to its hosts."""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        """Return the metadata of the slice: the startup script and the public ssh key. It contains no secret."""

    def deliver(
        self, run: CloudRun, attempt: AttemptEntry, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]]
    ) -> None:
        """Copy the job to all hosts. Copying it again changes nothing.

        Raises:
          CloudUnavailable: A host cannot be reached yet.
        """

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        """Return why the setup of a host failed before its agent could report it, or an empty text."""


class ControlDisplay(Protocol):
    """Shows what a controller does."""

    def show(self, view: ControlView, action: Action) -> None: ...

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        """Show that another controller acts."""

    def trouble(self, message: str) -> None:
        """Show that a call failed and is repeated."""


class Controller:
    """Controls one run until its end.

    It may be killed at any moment, and any number of controllers may exist. Each reads the state from the cloud.

    Args:
      files: the record of the run. `run.json` exists.
      providers: by name, at least those of the run's options.
      delivery: brings the job to the hosts.
      holder: the name of this controller in the lease.
    """

    def __init__(
        self,
        files: RunFiles,
        providers: Mapping[str, Provider],
        delivery: JobDelivery,
        display: ControlDisplay,
        holder: str,
        since: float = 0.0,
    ) -> None:
        self.files, self.providers, self.delivery, self.display = files, providers, delivery, display
        self.lease = Lease(files, holder)
        self.observer = RunObserver(files, since)
        self._swept_at: float | None = None
        self._checked_at = float("-inf")

    def follow(
        self,
        sleep: Callable[[float], None],
        poll_seconds: float = POLL_SECONDS,
        until: Callable[[ControlView], bool] = lambda view: False,
    ) -> tuple[ControlView, EndRun | None]:
        """Act until the run has ended, or `until` is true. Calls that fail for a while are repeated for ever."""
        failures = 0
        while True:
            try:
                view, action = self.step()
                failures = 0
            except (CloudUnavailable, StorageError, OSError) as error:
                failures += 1
                self.display.trouble(str(error))
                sleep(min(poll_seconds * 2 ** min(failures, 10), LONGEST_RETRY_SECONDS))
                continue
            if isinstance(action, EndRun):
                return view, action
            if until(view):
                return view, None
            if isinstance(action, Pause):
                sleep(poll_seconds)

    def step(self) -> tuple[ControlView, Action]:
        """Look once and act once."""
        now = self._now()
        run = self.files.run()
        if run is None:
            raise UserError(
                "E-CLOUD-050",
                f"there is no cloud run in {self.files.address}",
                why=f"{self.files.files.address}/run.json does not exist",
                fix="start it with `forerun run JOB`; `forerun ps` lists the runs that exist",
            )
        run = require_undamaged(run)
        other = self.lease.take(now)
        if other is None and (self._swept_at is None or now - self._swept_at > SWEEP_SECONDS):
            self.sweep()
            self._swept_at = now
        view = self.observer.look(run, self.providers, self._now)
        action = decide(view)
        if other is not None and not isinstance(action, EndRun):
            self.display.standby(view, other)
            return view, Pause(f"{other.holder} controls the run")
        self.display.show(view, action)
        if isinstance(action, EndRun):
            self.sweep()
            if other is None:
                write_summary(self.files, run_summary(view, action.reason))
                self.lease.release(now)
        else:
            self._perform(run, view, action)
        return view, action

    def sweep(self) -> None:
        """Delete slices of this run whose attempt has ended.

        They exist only if a controller was suspended between its decision and its request, for longer than its lease.
        """
        run = undamaged(self.files.run())
        if run is None:
            return
        for provider in self.providers.values():
            for resource in provider.list():
                if not is_slice_of(run, resource.labels, resource.metadata):
                    continue
                if undamaged(self.files.end(int(resource.labels[labels.ATTEMPT]))) is not None:
                    provider.delete(resource.name, resource.zone)

    def _now(self) -> float:
        return next(iter(self.providers.values())).now()

    def _perform(self, run: CloudRun, view: ControlView, action: Action) -> None:
        match action:
            case StartAttempt(entry):
                self.files.create_attempt(entry)
            case RequestSlice(entry):
                self._request(run, view, entry)
            case RecordReady(entry, at):
                self.files.create_ready(entry.number, ReadyEntry(at))
            case DeliverJob(entry):
                self._deliver(run, view, entry)
            case RequestStop(reason):
                self.files.request_stop(StopEntry(view.now, reason))
            case EndAttempt():
                self._end(view, action)
            case Pause() if view.delivered and view.current is not None and view.now > self._checked_at:
                self._check_setup(view, view.current.entry)
            case _:
                pass

    def _request(self, run: CloudRun, view: ControlView, entry: AttemptEntry) -> None:
        provider = self.providers[entry.option.provider]
        try:
            provider.create(slice_request(run, entry, self.delivery.metadata(run, entry)))
        except RequestRefused as refused:
            # The refusal may answer a repeated request, so something may exist: delete as at every other end.
            self._end(view, EndAttempt(entry, ENDED_REFUSED, str(refused), refused.failure))
            return
        self.observer.requested[entry.number] = view.now
        if undamaged(self.files.end(entry.number)) is not None:
            provider.delete(entry.resource, entry.option.zone)  # another controller has ended it in the meantime

    def _deliver(self, run: CloudRun, view: ControlView, entry: AttemptEntry) -> None:
        provider = self.providers[entry.option.provider]
        hosts = provider.addresses(entry.resource, entry.option.zone)
        keys = provider.host_keys(entry.resource, entry.option.zone)
        if len(hosts) < entry.option.hosts or len(keys) < len(hosts):
            raise CloudUnavailable(f"{entry.resource}: {len(hosts)} addresses and {len(keys)} host keys are known")
        try:
            self.delivery.deliver(run, entry, hosts, keys)
        except UserError as error:
            if not isinstance(error, StorageError):
                self._end(view, EndAttempt(entry, ENDED_BROKEN, error.what))  # it would be billed for nothing
            raise
        self.observer.delivered.add(entry.number)

    def _check_setup(self, view: ControlView, entry: AttemptEntry) -> None:
        """End an attempt whose setup failed before the agents started. They report every later failure."""
        self._checked_at = view.now + SETUP_CHECK_SECONDS
        if len(view.hosts) >= entry.option.hosts:
            return
        provider, zone = self.providers[entry.option.provider], entry.option.zone
        hosts, keys = provider.addresses(entry.resource, zone), provider.host_keys(entry.resource, zone)
        silent = [host for host in hosts if host.index not in view.hosts and host.index < len(keys)]
        failure = self.delivery.setup_failure(silent, [keys[host.index] for host in silent], zone)
        if failure:
            self._end(view, EndAttempt(entry, ENDED_BROKEN, failure))

    def _end(self, view: ControlView, action: EndAttempt) -> None:
        entry = action.entry
        provider = self.providers[entry.option.provider]
        deleted_at = provider.delete(entry.resource, entry.option.zone)
        known = [at for at in (action.at, deleted_at) if at is not None]
        at = min(known) if known else provider.now()
        ready = undamaged(self.files.ready(entry.number))
        preempted = action.reason == ENDED_PREEMPTED
        usd = attempt_usd(entry.option.usd_per_hour, None if ready is None else ready.at, at, preempted=preempted)
        end = EndEntry(at, action.reason, usd, action.detail, "" if action.failure is None else action.failure.value)
        if ready is None:
            end = replace(end, at=provider.now())  # the pause before the next attempt begins here
        self.files.create_end(entry.number, end)


def is_slice_of(run: CloudRun, found: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    """Return whether a resource with these labels and metadata is a slice of the run."""
    return (
        found.get(labels.RUN) == labels.run_label(run.name)
        and found.get(labels.ROLE) == labels.SLICE_ROLE
        and found.get(labels.ATTEMPT, "").isdigit()
        and metadata.get(labels.FOLDER, run.folder) == run.folder
    )
