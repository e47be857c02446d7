"""The controller: a loop that looks at a run, decides, and carries the decision out."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from forerun.cloud.control.decide import decide, is_limit
from forerun.cloud.control.ledger import LedgerAttempt, RunLedger
from forerun.cloud.control.next_attempt import slice_request
from forerun.cloud.control.observation import RunObserver
from forerun.cloud.control.run_report import run_summary, write_summary
from forerun.cloud.control.run_view import ControlView, attempt_deadline, keeper_usd
from forerun.cloud.google.clock import SteadyClock, elapsed_seconds
from forerun.cloud.provider import (
    FAILURES,
    CloudUnavailable,
    HostAddress,
    NameTaken,
    Provider,
    RequestRefused,
    Resource,
    SliceState,
    ZonesUnreachable,
    failure_text,
)
from forerun.cloud.record.entries import (
    ENDED_BROKEN,
    ENDED_BUDGET,
    ENDED_PREEMPTED,
    ENDED_REFUSED,
    LEASE_SECONDS,
    AttemptEntry,
    CloudRun,
    EndEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import StorageError, UserError


class JobDelivery(Protocol):
    """How a job gets to its hosts."""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        """Return the metadata of the slice: the startup script and the public ssh key. It contains no secret."""

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        """Copy the job to all hosts. Copying it again changes nothing.

        Args:
          ready_at: since when the slice is billed, as this controller knows it.

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
        """Show that a call failed and is repeated, or that a file is damaged."""


def holder_name() -> str:
    """Return a name for this process: readable, and different for each process."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """The lease of one controller."""

    def __init__(self, files: RunFiles, holder: str) -> None:
        self.files, self.holder = files, holder

    def take(self, now: float) -> LeaseEntry | None:
        """Take or renew the lease. Return None on success, else the lease of the controller that has it."""
        found = undamaged(self.files.lease())
        if found is not None and found.holder != self.holder and found.is_held(now):
            return found
        if found is None or found.holder != self.holder or not LEASE_SECONDS / 2 <= found.until - now <= LEASE_SECONDS:
            self.files.write_lease(LeaseEntry(self.holder, now + LEASE_SECONDS))
        return None

    def release(self, now: float) -> None:
        found = undamaged(self.files.lease())
        if found is not None and found.holder == self.holder:
            self.files.write_lease(LeaseEntry(self.holder, now))


POLL_SECONDS = 5.0
SWEEP_SECONDS = 300.0  # between two searches for slices that nothing needs
SETUP_CHECK_SECONDS = 20.0  # between two looks at the setup of hosts whose agents do not report yet
LONGEST_RETRY_SECONDS = 60.0
OVERDUE_RETRY_SECONDS = 10.0  # between two tries to delete a slice after its deadline
LAST_TRIES = 10  # of the summary


class Controller:
    """Controls one run until its end.

    It may be killed at any moment, and any number of controllers may exist. Each reads the state from the cloud.

    Its limits do not depend on the record, which everyone who may write to the bucket can change: the cap and the
    prices are those of `run`, and times and costs are those of `ledger`.

    Args:
      run: what the user has agreed to.
      files: the record of the run.
      providers: by name, at least those of the run's options.
      delivery: brings the job to the hosts.
      holder: the name of this controller in the lease.
      since: when the user started or resumed the run, in the cloud's time.
      ledger: what this machine knows about the run; None: nothing yet.
      elapsed: a time of this machine that only grows.
    """

    def __init__(
        self,
        run: CloudRun,
        files: RunFiles,
        providers: Mapping[str, Provider],
        delivery: JobDelivery,
        display: ControlDisplay,
        holder: str,
        since: float = 0.0,
        ledger: RunLedger | None = None,
        elapsed: Callable[[], float] = elapsed_seconds,
    ) -> None:
        self.files, self.providers, self.delivery, self.display = files, providers, delivery, display
        self.ledger = RunLedger() if ledger is None else ledger
        self.lease = Lease(files, holder)
        self.observer = RunObserver(run, files, self.ledger, since)
        self.clock = SteadyClock(next(iter(providers.values())).now, elapsed)
        self._has_rented = run.keeper_at is not None or bool(self.ledger.open)
        self._final: UserError | None = None
        self._swept_at: float | None = None
        self._checked_at = float("-inf")
        self._told: set[str] = set()  # damage that was shown
        self._last_tries = 0

    def follow(
        self,
        sleep: Callable[[float], None],
        poll_seconds: float = POLL_SECONDS,
        until: Callable[[ControlView], bool] = lambda view: False,
    ) -> tuple[ControlView, EndRun | None]:
        """Act until the run has ended, or `until` is true.

        Calls that fail are repeated for ever, because something may be rented.

        Raises:
          UserError: A call was refused before anything was rented.
        """
        failures = 0
        while True:
            try:
                view, action = self.step()
                failures = 0
            except FAILURES as error:
                if self._ends_control(error):
                    raise
                if self._has_used_budget():
                    return self.observer.view(0.0), EndRun(ENDED_BUDGET, failure_text(error))
                failures += 1
                pause = self._pause(poll_seconds, failures)
                self.display.trouble(f"{failure_text(error)}; next try in {pause:.0f} s")
                sleep(pause)
                continue
            if isinstance(action, EndRun):
                return view, action
            if until(view):
                return view, None
            if isinstance(action, Pause):
                sleep(poll_seconds)

    def step(self) -> tuple[ControlView, Action]:
        """Look once and act once. If that fails, enforce the limit without the record."""
        try:
            return self._step()
        except FAILURES:
            self._enforce_limit()
            raise

    def _step(self) -> tuple[ControlView, Action]:
        now = self.clock.now()
        self.observer.read(self.providers, now)
        self._show_damage()
        self._record_missing_ends()
        other = self.lease.take(now)
        if self._swept_at is None or now - self._swept_at > SWEEP_SECONDS:
            self.sweep()
            self._swept_at = now
        view = self.observer.look(self.providers, self.clock.now)
        if view.status is not None and view.status.state is not SliceState.ABSENT:
            self._has_rented = True
        action = decide(view)
        if other is not None and not isinstance(action, EndRun) and not is_limit(view, action):
            self.display.standby(view, other)
            return view, Pause(f"{other.holder} controls the run")
        self.display.show(view, action)
        if isinstance(action, EndRun):
            self.sweep()
            if other is None:
                self._finish(view, action)
        else:
            self._perform(view, action)
        return view, action

    def sweep(self) -> None:
        """Delete slices of this run that belong to no open attempt, and verify ends that the record has.

        Such slices exist if a controller was suspended between its decision and its request, for longer than its lease,
        or if the record was changed.
        """
        listed: set[int] = set()
        unlisted: set[tuple[str, str]] = set()
        for provider in self.providers.values():
            try:
                resources = provider.list()
            except ZonesUnreachable as error:
                resources = error.resources
                unlisted |= {(provider.name, zone) for zone in error.zones}
            for resource in resources:
                if is_slice_of(self.observer.run, resource.labels, resource.metadata):
                    listed.add(int(resource.labels[labels.ATTEMPT]))
                    self._sweep_slice(provider, resource)
        for number, recorded in self.observer.recorded_ends.items():
            attempt = self.ledger.attempts[number]
            option = attempt.entry.option
            if attempt.end is None and number not in listed and (option.provider, option.zone) not in unlisted:
                # The list shows that the slice is gone. If the API does not tell when, only the record does.
                ended_at = self.observer.ask_billing(self.providers[option.provider], attempt.entry)
                at = recorded.at if ended_at is None else ended_at
                action = EndAttempt(attempt.entry, recorded.reason, recorded.detail)
                self._keep_end(self.ledger.attempts[number], action, at)

    def _sweep_slice(self, provider: Provider, resource: Resource) -> None:
        number = int(resource.labels[labels.ATTEMPT])
        attempt, recorded = self.ledger.attempts.get(number), self.observer.recorded_ends.get(number)
        entry = undamaged(self.files.attempt(number)) if attempt is None else attempt.entry
        is_own = entry is not None and (entry.option.provider, entry.option.zone) == (provider.name, resource.zone)
        if attempt is not None and attempt.end is None and recorded is not None and is_own:
            self._end(EndAttempt(attempt.entry, recorded.reason, recorded.detail))
            return
        if attempt is None:
            has_ended = undamaged(self.files.end(number)) is not None
        else:
            has_ended = attempt.end is not None or recorded is not None
        # A slice without an attempt, or in another zone than its open attempt, is the work of a changed record.
        # Resources without machines may be listed in another zone than their slice.
        if has_ended or (not is_own and resource.slice):
            provider.delete(resource.name, resource.zone)

    def _perform(self, view: ControlView, action: Action) -> None:
        match action:
            case StartAttempt(entry):
                # If the record was deleted, an attempt of another controller may run that this one does not know.
                self.sweep()
                if self.files.create_attempt(entry):
                    self.ledger.add(LedgerAttempt(entry))
            case RequestSlice(entry):
                self._request(view, entry)
            case RecordReady(entry, at):
                self.ledger.bill_from(entry.number, min(at, view.now))
                self.files.create_ready(entry.number, ReadyEntry(min(at, view.now)))
            case DeliverJob(entry):
                self._deliver(view, entry)
            case RequestStop(reason):
                stop = StopEntry(view.now, reason)
                self.files.request_stop(stop)
                self.observer.request_stop(stop)
            case EndAttempt():
                self._end(action)
            case Pause() if view.delivered and view.current is not None and view.now > self._checked_at:
                self._check_setup(view, view.current.entry)
            case _:
                pass

    def _request(self, view: ControlView, entry: AttemptEntry) -> None:
        if self.clock.now() - view.now > LEASE_SECONDS / 2:
            return  # this process was suspended since it looked, so another controller may have started an attempt
        provider = self.providers[entry.option.provider]
        request = slice_request(view.run, entry, self.delivery.metadata(view.run, entry))
        was_rented, self._has_rented = self._has_rented, True
        self.observer.unready_at[entry.number] = view.now
        try:
            provider.create(request)
        except RequestRefused as refused:
            # The refusal may answer a repeated request, so something may exist: delete as at every other end.
            self._end(EndAttempt(entry, ENDED_REFUSED, str(refused), refused.failure))
            return
        except UserError:
            # The answer to an earlier try may be lost, so something may exist.
            if provider.status(entry.resource, entry.option.zone).state is SliceState.ABSENT:
                self._has_rented = was_rented
            raise
        self.observer.requested[entry.number] = view.now
        if undamaged(self.files.end(entry.number)) is not None:
            provider.delete(entry.resource, entry.option.zone)  # another controller has ended it in the meantime

    def _deliver(self, view: ControlView, entry: AttemptEntry) -> None:
        provider = self.providers[entry.option.provider]
        hosts = provider.addresses(entry.resource, entry.option.zone)
        keys = provider.host_keys(entry.resource, entry.option.zone)
        if len(hosts) < entry.option.hosts or len(keys) < len(hosts):
            raise CloudUnavailable(f"{entry.resource}: {len(hosts)} addresses and {len(keys)} host keys are known")
        try:
            self.delivery.deliver(view.run, entry, hosts, keys, self.ledger.attempts[entry.number].ready_at)
        except UserError as error:
            if not isinstance(error, StorageError):
                self._end(EndAttempt(entry, ENDED_BROKEN, error.what))  # it would be billed for nothing
                self._final = error
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
            self._end(EndAttempt(entry, ENDED_BROKEN, failure))

    def _end(self, action: EndAttempt) -> None:
        """Delete the slice of an attempt, verify it, and keep the end of the attempt."""
        entry = action.entry
        provider = self.providers[entry.option.provider]
        if entry.number in self.observer.recorded_ends:
            self.observer.ask_billing(provider, entry)
        deleted_at = provider.delete(entry.resource, entry.option.zone)
        now = self.clock.now()
        # The clock of a controller that has just started may be wrong. It counts only if the cloud tells no time.
        at = min((at for at in (action.at, deleted_at) if at is not None), default=now)
        self._keep_end(self.ledger.attempts[entry.number], action, at)

    def _keep_end(self, attempt: LedgerAttempt, action: EndAttempt, at: float) -> None:
        """Keep the end of an attempt whose slice is gone, first on this machine, then in the record."""
        entry, number = attempt.entry, attempt.entry.number
        recorded = self.observer.recorded_ends.get(number)
        # Neither a wrong clock nor a record can end the billing before this controller saw the slice for the last time.
        at = max(at, attempt.seen_at or at)
        # Only the state of the slice shows a preemption. The record, silent hosts and an absent slice do not.
        preempted = action.reason == ENDED_PREEMPTED and action.is_preempted
        usd = attempt_usd(entry.option.usd_per_hour, attempt.ready_at, at, preempted=preempted)
        if attempt.ready_at is None and recorded is None:
            at = self.clock.now()  # the pause before the next attempt begins here
        usd = max(usd, 0.0 if recorded is None else recorded.usd)
        end = EndEntry(at, action.reason, usd, action.detail, "" if action.failure is None else action.failure.value)
        self.ledger.end(number, end)
        self.files.create_end(number, end)

    def _enforce_limit(self) -> None:
        """Delete slices whose time is over. This needs neither the record nor the lease, only the API."""
        for attempt in self.ledger.open:
            entry, number = attempt.entry, attempt.entry.number
            provider = self.providers.get(entry.option.provider)
            if provider is None:
                continue
            try:
                status = provider.status(entry.resource, entry.option.zone)
                now = self.clock.now()
                status = self.observer.note(number, status, now)
                if status.state is SliceState.READY:
                    self.ledger.bill_from(number, min(now, now if status.ready_at is None else status.ready_at))
            except FAILURES:
                # The slice may have become ready right after the API told the opposite for the last time.
                since = self.observer.unready_at.get(number)
                if attempt.ready_at is None and since is not None and self._seconds_left(attempt, since) <= 0:
                    self.ledger.bill_from(number, since)
            attempt = self.ledger.attempts[number]
            if self._seconds_left(attempt, attempt.ready_at) > 0:
                continue
            try:
                self._end(EndAttempt(entry, ENDED_BUDGET, "deleted at the deadline"))
            except FAILURES as error:
                self.display.trouble(f"{entry.resource} is billed after its deadline: {failure_text(error)}")

    def _seconds_left(self, attempt: LedgerAttempt, ready_at: float | None) -> float:
        """Return the time until the deadline of an attempt; infinity if it has none."""
        deadline = None if ready_at is None else attempt_deadline(self.observer.run, attempt.entry, ready_at)
        return float("inf") if deadline is None else deadline - self.clock.now()

    def _pause(self, poll_seconds: float, failures: int) -> float:
        """Return the seconds before the next try. A deadline shortens them."""
        seconds_left = float("inf")
        with suppress(*FAILURES):
            times = [(one, one.ready_at or self.observer.unready_at.get(one.entry.number)) for one in self.ledger.open]
            seconds_left = min((self._seconds_left(one, at) for one, at in times), default=seconds_left)
        if seconds_left <= 0:
            return min(poll_seconds, OVERDUE_RETRY_SECONDS)
        longest = max(min(seconds_left, LONGEST_RETRY_SECONDS), poll_seconds)
        return min(poll_seconds * 2 ** min(failures, 10), longest)

    def _has_used_budget(self) -> bool:
        """Return whether the keeper alone has cost the cap while nothing else is rented. It then deletes itself."""
        run = self.observer.run
        with suppress(*FAILURES):  # of the cloud's clock
            return bool(not self.ledger.open and run.max_usd and keeper_usd(run, self.clock.now()) >= run.max_usd)
        return False

    def _ends_control(self, error: Exception) -> bool:
        """Return whether an error ends the control: the user must correct it, and nothing is rented."""
        if isinstance(error, UserError) and (error is self._final or isinstance(error, NameTaken)):
            return True  # repeating the latter would control, and then delete, the slice of another run
        return not self._has_rented and not isinstance(error, CloudUnavailable | OSError | StorageError)

    def _show_damage(self) -> None:
        damage = [f"{path} is not valid: {reason}" for path, reason in self.observer.damaged.items()]
        for text in [*damage, self.ledger.problem]:
            if text and text not in self._told:
                self._told.add(text)
                self.display.trouble(f"{text}; the limits of the run do not depend on it")

    def _record_missing_ends(self) -> None:
        """Record the ends that an earlier call could not record, or that were deleted."""
        for number in sorted(self.observer.unrecorded_ends):
            end = self.ledger.attempts[number].end
            assert end is not None
            self.files.create_end(number, end)
            self.observer.unrecorded_ends.discard(number)

    def _finish(self, view: ControlView, action: EndRun) -> None:
        """Write the summary of a run that has ended. A bucket that refuses it must not hold the process for ever."""
        try:
            write_summary(self.files, run_summary(view, action.reason))
            self.lease.release(view.now)
        except FAILURES as error:
            self._last_tries += 1
            if self._last_tries < LAST_TRIES:
                raise
            self.display.trouble(failure_text(error))


def is_slice_of(run: CloudRun, found: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    """Return whether a resource with these labels and metadata is a slice of the run."""
    return (
        found.get(labels.RUN) == labels.run_label(run.name)
        and found.get(labels.ROLE) == labels.SLICE_ROLE
        and found.get(labels.ATTEMPT, "").isdigit()
        and metadata.get(labels.FOLDER, run.folder) == run.folder
    )
