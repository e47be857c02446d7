"""`forerun run`: train a job on a rented slice, from the plan to the exported model."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import agrees
from forerun.cli.cloud.run_outline import RunOptions
from forerun.errors import UserError
from forerun.exit_codes import STOPPED
from forerun.reporter import LineReporter
from forerun.units import Bytes
from forerun.verbs.option_types import JobFile, Override

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from forerun.cloud.compute.compute_provider import ComputeProvider
    from forerun.cloud.control.actions import Action, EndRun
    from forerun.cloud.control.controller import JobDelivery
    from forerun.cloud.control.ledger import RunLedger
    from forerun.cloud.control.run_view import ControlView
    from forerun.cloud.provider import Provider, SliceRequest
    from forerun.cloud.record.entries import CloudRun, LeaseEntry
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.setup.job_files import JobFile as SentFile
    from forerun.cloud.setup.job_files import JobFiles
    from forerun.cloud.ssh.delivery import SshDelivery

HIDDEN_CHARACTERS = 200  # longer values of metadata are shortened in --dry-run


@options_of("forerun.cli.cloud.run_outline:RunOptions")
def run(
    job: JobFile,
    *overrides: Override,
    yes: bool = False,
    dry_run: bool = False,
    list_files: bool = False,
    print_startup: bool = False,
    **options: Any,
) -> int:
    """Plan, ask once, then control the run until it has ended.

    Args:
      yes: do not ask before renting
      dry_run: print the plan and every request, and send nothing
      list_files: print the files that are sent to the hosts, and end
      print_startup: print the startup script of the hosts, and end
    """
    from forerun.cli.cloud.run_outline import outline
    from forerun.cloud.control.begin import begin_run, usd_so_far, with_cap
    from forerun.cloud.control.ledger import ledger_of
    from forerun.cloud.one_line import require_one_line
    from forerun.cloud.providers import GOOGLE, SSH, provider_named
    from forerun.cloud.record.read_entry import undamaged
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.setup.job_files import job_files
    from forerun.cloud.setup.startup import HOST_JOB_FOLDER
    from forerun.cloud.view.project_state import api_errors
    from forerun.cloud.view.run_location import remember_runs
    from forerun.verbs.job_files import open_job

    require_one_line({"job": job, "overrides": overrides, **options})
    chosen = RunOptions(**options)
    loaded = open_job(job, overrides)
    folder = loaded.path.resolve().parent
    local = job_files(loaded.path.read_text(encoding="utf-8"), folder, overrides, HOST_JOB_FOLDER)
    if list_files:
        print_file_list(loaded.path, local)
        return 0
    wanted = outline(chosen, loaded, overrides)
    if print_startup:
        from forerun.cloud.setup.startup import startup_script

        print(startup_script(wanted, wanted.options[0]), end="")
        return 0
    providers = providers_for(chosen.project, [option.provider for option in wanted.options])
    if dry_run:
        return _dry_run(wanted, folder, providers, local)
    if wanted.keeper:
        compute = cast("ComputeProvider", provider_named("compute", chosen.project))
        providers.setdefault("compute", compute)
    files, ledger = RunFiles(wanted.folder), ledger_of(wanted.folder)
    files.files.require_writable()
    is_resumed = files.run() is not None
    entries = [entry for one in files.attempts().values() if (entry := undamaged(one)) is not None]
    entries += [one.entry for one in ledger.attempts.values()]
    used = {entry.option.provider for entry in entries} & {*GOOGLE, SSH}  # a record may name any provider
    providers |= providers_for(chosen.project, used - set(providers))
    agreed = with_cap(files, wanted, ledger, max_usd_given=chosen.max_usd is not None)
    with api_errors(providers):
        now = next(iter(providers.values())).now()
    if undamaged(files.finished()) is not None:
        if not ledger.open and all(undamaged(files.end(number)) is not None for number in files.attempts()):
            print(f"the run {wanted.name} has finished; download its results: forerun fetch {wanted.name}")
            return 0
        # Only the deletion of the last slice must be verified.
    else:
        spent_usd = usd_so_far(files, agreed, ledger, providers, now)
        _print_outline(agreed, providers, resumed=is_resumed, spent_usd=spent_usd, local=local)
        if not agrees(_question(agreed, spent_usd), yes=yes):
            print("nothing is rented")
            return 1
    with api_errors(providers):
        begun = begin_run(files, agreed, providers, now, ledger=ledger)
    remember_runs([wanted.folder])
    delivery = delivery_for(begun, folder, providers, through_iap=chosen.tunnel_through_iap, local=local)
    if begun.keeper and undamaged(files.finished()) is None:
        from forerun.cloud.keeper.keeper_start import start_keeper

        start_keeper(
            begun, files, compute, local, delivery.identity, delivery.secrets, LineReporter(sys.stderr), time.sleep
        )
        if chosen.no_wait:
            print(f"the keeper controls {begun.name}. Follow it: forerun logs {begun.name}; list it: forerun ps")
            return 0
    view, end = control(
        begun, files, delivery, providers, now, ledger, _trains if chosen.no_wait else lambda view: False
    )
    if end is None:
        print(f"{begun.name} trains. Follow it: forerun logs {begun.name}; list it: forerun ps")
        return 0
    if begun.keeper:
        from forerun.cloud.keeper.keeper_start import remove_keeper

        with api_errors([compute.name]):
            remove_keeper(begun, compute)
    return _report(view, end)


def control(
    wanted: CloudRun,
    files: RunFiles,
    delivery: JobDelivery,
    providers: Mapping[str, Provider],
    now: float,
    ledger: RunLedger,
    until: Callable[[ControlView], bool],
) -> tuple[ControlView, EndRun | None]:
    """Control a run until its end, or until a condition is met. Return the last view and the end."""
    from forerun.cloud.control.controller import Controller, holder_name

    name = wanted.name
    interrupt.set_report(
        lambda: (
            f"{name} continues in the cloud, within its budget. "
            + ("" if wanted.keeper else "This process no longer replaces a preempted slice.")
            + "\n"
            f"control it again: the same command; stop it with a checkpoint: forerun stop {name}"
        )
    )
    with ControlLines(sys.stderr) as display:
        controller = Controller(wanted, files, providers, delivery, display, holder_name(), now, ledger)
        return controller.follow(time.sleep, until=until)


def providers_for(project: str | None, names: Iterable[str]) -> dict[str, Provider]:
    """Return the providers with these names."""
    from forerun.cloud.providers import provider_named

    return {name: provider_named(name, project) for name in dict.fromkeys(names)}


def delivery_for(
    wanted: CloudRun,
    job_folder: Path,
    providers: Mapping[str, Provider],
    *,
    through_iap: bool,
    local: JobFiles | None = None,
) -> SshDelivery:
    """Return the delivery with the run's ssh key on this machine."""
    from forerun.cloud.ssh.delivery import SshDelivery
    from forerun.cloud.ssh.keys import identity_of

    rest = getattr(next(iter(providers.values())), "rest", None)  # machines of the user have no project
    project = None if rest is None else rest.project
    return SshDelivery(
        job_folder, identity_of(wanted.folder), project, LineReporter(sys.stderr), through_iap=through_iap, local=local
    )


def _trains(view: ControlView) -> bool:
    current = view.current
    return current is not None and current.ready is not None and len(view.hosts) >= current.entry.option.hosts


def _first_request(wanted: CloudRun, delivery: JobDelivery) -> SliceRequest:
    from forerun.cloud.control.next_attempt import first_attempt, slice_request

    entry = first_attempt(wanted)
    return slice_request(wanted, entry, delivery.metadata(wanted, entry))


def _print_outline(
    wanted: CloudRun, providers: Mapping[str, Provider], *, resumed: bool, local: JobFiles, spent_usd: float = 0.0
) -> None:
    from forerun.cloud.control.run_report import duration, option_text
    from forerun.cloud.ssh.delivery import secrets_in

    print(f"{'resume' if resumed else 'run'} {wanted.name}: checkpoints and results in {wanted.folder}")
    for number, option in enumerate(wanted.options[:6], 1):
        hours = ""
        if option.hours is not None:
            hours = f", {duration(3600 * option.hours)}, ${option.hours * option.usd_per_hour:.2f}"
        print(f"  {number}. {option_text(option)}: ${option.usd_per_hour:.2f}/h{hours}")
    if len(wanted.options) > 6:
        print(f"  and {len(wanted.options) - 6} more zones, if these have no capacity")
    if wanted.device == "cpu":
        LineReporter(sys.stderr).warn("the job has device: cpu, so the rented chips stay idle")
    names = secrets_in(os.environ)
    if names:
        print(f"  sent to the hosts by ssh: {', '.join(names)}")
    print(f"  {file_summary(local)}")
    for line in limit_lines(wanted, providers, spent_usd):
        print(line)
    if wanted.max_usd is not None:
        planned = wanted.options[0].hours
        if planned is not None and planned * wanted.options[0].usd_per_hour > wanted.max_usd:
            LineReporter(sys.stderr).warn("the plan costs more than the cap: the run will stop there with a checkpoint")


def _question(wanted: CloudRun, spent_usd: float = 0.0) -> str:
    if wanted.max_usd is None:
        return f"train {wanted.name} on {wanted.options[0].slice}?"
    spent = f", of which ${spent_usd:.2f} are spent" if spent_usd else ""
    return f"rent {wanted.options[0].slice} for at most ${wanted.max_usd:.2f}{spent}?"


def _dry_run(wanted: CloudRun, folder: Path, providers: Mapping[str, Provider], local: JobFiles) -> int:
    """Print every request of the first attempt, and send nothing."""
    _print_outline(wanted, providers, resumed=False, local=local)
    request = _first_request(wanted, delivery_for(wanted, folder, providers, through_iap=False))
    print("requests:")
    for one in providers[wanted.options[0].provider].requests(request):
        print(json.dumps(_shortened(one), indent=1))
    print("then: wait until it is ready, send the job by ssh, train, export, and delete everything that was created")
    return 0


def _shortened(value: object) -> object:
    """Return a JSON value in which long texts, such as the startup script, are replaced by their length."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(one) for one in value]
    if isinstance(value, str) and len(value) > HIDDEN_CHARACTERS:
        return f"<{len(value)} characters: see --print-startup>"
    return value


def _report(view: ControlView, end: EndRun) -> int:
    from forerun.cloud.control.run_report import run_summary, summary_lines
    from forerun.cloud.record.entries import ENDED_FAILED, ENDED_FINISHED

    name = view.run.name
    for line in summary_lines(run_summary(view, end.reason)):
        print(line)
    if end.reason == ENDED_FINISHED:
        print(f"finished; download the results: forerun fetch {name}")
        return 0
    if end.reason == ENDED_FAILED:
        raise UserError(
            "E-CLOUD-055",
            f"the run {name} failed; all its machines are deleted",
            why=end.detail,
            fix=f"see its log with forerun logs {name}; after a correction, the same command resumes it",
        )
    print(f"stopped ({end.reason}) with its checkpoints in {view.run.folder}; the same command resumes it")
    return STOPPED


# ---- Limits ----


API_NAMES = {"tpu": "the Cloud TPU API", "compute": "Compute Engine"}


def limit_lines(run: CloudRun, providers: Mapping[str, Provider], spent_usd: float) -> list[str]:
    """Return the cap, what is spent of it, and which limits keep it for these machines; no lines without a cap."""
    if run.max_usd is None:
        return []
    spent = f", of which ${spent_usd:.2f} are spent" if spent_usd else ""
    controller = "the keeper" if run.keeper else "this process"
    return [
        f"  cap: ${run.max_usd:.2f} for all attempts together{spent}",
        "  limits that delete the machines within the cap, each without the others:",
        f"    controller: yes, {controller}",
        "    hosts: yes, an agent on each host; until it runs, a watchdog in the startup script",
        f"    cloud API: {_api_text(run, providers)}",
    ]


def _api_text(run: CloudRun, providers: Mapping[str, Provider]) -> str:
    """Return for which machines the API itself has a limit: it depends on the provider and the capacity."""
    from forerun.cloud.control.next_attempt import first_attempt, slice_request

    enforced: dict[tuple[str, str], bool] = {}
    for option in run.options:
        request = slice_request(run, first_attempt(run, option), {})
        kind = f"{API_NAMES.get(option.provider, option.provider)}", option.capacity
        enforced[kind] = enforced.get(kind, True) and providers[option.provider].enforces_limit(request)
    texts = [
        f"yes, {api} deletes them at the deadline" if enforces else f"no, {api} has no limit for {capacity} slices"
        for (api, capacity), enforces in enforced.items()
    ]
    return "; ".join(dict.fromkeys(texts))


# ---- Files ----


_SHOWN = 5  # names in the question


def file_summary(local: JobFiles) -> str:
    """Return number, bytes and first names of the files that travel, and of those that are skipped, as one line."""
    count = len(local.files)
    text = f"{count} local file{'s'[: count != 1]}, {Bytes(local.size_bytes)}"
    text += _names([file.name for file in local.files])
    if local.skipped:
        text += f"; {len(local.skipped)} skipped" + _names([file.name for file in local.skipped])
    return f"sent to the hosts: {text}; all: --list-files"


def print_file_list(job_file: Path, local: JobFiles) -> None:
    """Print every file that `forerun run` sends, and every file that the rules skip."""
    from forerun.cloud.setup.job_files import JOB_FILE
    from forerun.cloud.setup.job_files import JobFile as SentFile
    from forerun.cloud.ssh.delivery import secrets_in

    for file in (SentFile(JOB_FILE, job_file.resolve()), *local.files):
        size = Bytes(file.source.stat().st_size)
        print(f"{_line(file.name)}  {size}" + ("" if _is_at(file) else f"  from {_line(str(file.source))}"))
    for skipped in local.skipped:
        print(f"skipped: {_line(skipped.name)} ({skipped.reason})")
    variables = ", ".join(secrets_in(os.environ)) or "none"
    print(f"{len(local.files) + 1} files; variables of the environment: {variables}")
    print("forerun itself, its locked requirements and generated settings and keys of the run are sent too")


def _is_at(file: SentFile) -> bool:
    return file.source.as_posix().endswith(f"/{file.name}")


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    suffix = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ": " + ", ".join(map(_line, names[:_SHOWN])) + suffix


def _line(name: str) -> str:
    """Return a file name on one line: a name with a line break must not look like two files."""
    return name if name.isprintable() else json.dumps(name)


# ---- Display ----


LINE_SECONDS = 60.0  # between two lines about the same state, without a terminal


class ControlLines:
    """Prints one line for each event. On a terminal, the last line shows the present state."""

    def __init__(self, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._live = stream.isatty()
        self._state, self._printed_at = "", float("-inf")
        self._last = self._program = ""

    def __enter__(self) -> ControlLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def show(self, view: ControlView, action: Action) -> None:
        from forerun.cloud.control.actions import DeliverJob
        from forerun.cloud.control.run_report import event_text

        event = event_text(action)
        if event is not None and not (isinstance(action, DeliverJob) and event == self._last):
            self._line(event)
            self._last = event
        if event is None:
            self._show_state(view)

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        text = f"{lease.holder} controls the run; this process takes over if it ends"
        if text != self._last:
            self._line(text)
            self._last = text
        self._show_state(view)

    def trouble(self, message: str) -> None:
        text = message.splitlines()[0] if message else "no answer"
        if text != self._last:
            self._line(text)
            self._last = text

    def _show_state(self, view: ControlView) -> None:
        from forerun.cloud.control.run_report import phase_text, program_text, state_text

        program = program_text(view)
        if program is not None and program != self._program:
            self._program = program
            self._line(program)
        text = state_text(view)
        if self._live:
            self._clear()
            print(text[:119], end="", file=self._stream, flush=True)
            return
        current = view.current
        state = "" if current is None else f"{current.entry.number} {current.ready is None} {phase_text(view)}"
        if state != self._state or self._clock() - self._printed_at > LINE_SECONDS:
            self._state, self._printed_at = state, self._clock()
            self._line(text)

    def _line(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
