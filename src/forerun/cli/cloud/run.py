"""`forerun run`: train a job on a rented slice, from the plan to the exported model."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import agrees
from forerun.cli.cloud.run_options import RunOptions
from forerun.errors import UserError
from forerun.exit_codes import STOPPED
from forerun.reporter import LineReporter
from forerun.verbs.option_types import JobFile, Override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from forerun.cloud.compute.compute_provider import ComputeProvider
    from forerun.cloud.control.actions import EndRun
    from forerun.cloud.control.controller import JobDelivery
    from forerun.cloud.control.ledger import RunLedger
    from forerun.cloud.control.run_view import ControlView
    from forerun.cloud.provider import Provider, SliceRequest
    from forerun.cloud.record.entries import CloudRun
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.setup.job_files import JobFiles
    from forerun.cloud.ssh.delivery import SshDelivery

HIDDEN_CHARACTERS = 200  # longer values of metadata are shortened in --dry-run


@options_of("forerun.cli.cloud.run_options:RunOptions")
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
    from forerun.cli.cloud.file_list import print_file_list
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
    from forerun.cli.cloud.run_display import ControlLines
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
    from forerun.cli.cloud.file_list import file_summary
    from forerun.cli.cloud.run_limits import limit_lines
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
