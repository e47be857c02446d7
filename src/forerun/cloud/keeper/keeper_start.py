"""The start of a keeper from the user's machine, and its removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from forerun.cloud import labels
from forerun.cloud.compute.bodies import region_of
from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.compute.states import last_part
from forerun.cloud.google.answer_shape import Region
from forerun.cloud.host.settings import TRAIN_UNIT
from forerun.cloud.keeper.keeper_process import HOLDER, KeeperSettings
from forerun.cloud.provider import CloudUnavailable, Provider, RequestRefused, SliceRequest, SliceState
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.setup.bundle import Bundle, machine_bundle
from forerun.cloud.setup.job_files import JobFiles
from forerun.cloud.setup.requirements import locked_requirements
from forerun.cloud.setup.startup import AGENT_UNIT, deletion_paths, planned_python, slice_metadata
from forerun.cloud.setup.wheel import build_wheel
from forerun.cloud.ssh.delivery import deliver
from forerun.cloud.ssh.keys import public_key
from forerun.errors import UserError
from forerun.reporter import Reporter

POLL_SECONDS = 5.0
LIMIT_SECONDS = 1200.0  # until the keeper controls the run
SSH_SECONDS = 60.0
KEEPER_MACHINES = ("e2-small", "n2-standard-2", "n1-standard-1")  # in the order of preference
KEEPER_USD_PER_HOUR = 0.12  # an upper bound of the price of these machines in the regions that have TPUs
DEVICE = "none"  # neither packages for accelerators nor a test of devices
UNITS = Path(__file__).parent / "units"


def start_keeper(
    run: CloudRun,
    files: RunFiles,
    provider: ComputeProvider,
    local: JobFiles,
    identity: Path,
    secrets: Mapping[str, str],
    reporter: Reporter,
    sleep: Callable[[float], None],
) -> None:
    """Rent the keeper of a run, send it the job, and wait until it controls the run. Repeating it does no harm.

    Raises:
      UserError: The keeper does not start. It is deleted then.
    """
    if _controls(files, provider.now()):
        return
    zone, machine = keeper_place(provider, run.options[0].zone)
    name, project = keeper_name(run.name), provider.rest.project
    option = Option("compute", machine, zone, "on-demand", 1, run.keeper_usd_per_hour)
    attempt = AttemptEntry(0, option, name, provider.now(), None, 0.0)
    assert deletion_paths(attempt, project), "a keeper that is not set up deletes itself"
    metadata = slice_metadata(replace(run, device=DEVICE), attempt, public_key(identity), project)
    limit = int(run.max_usd / run.keeper_usd_per_hour * 3600) if run.max_usd and run.keeper_usd_per_hour else None
    request = keeper_request(run, zone, machine, metadata, limit)
    settings = KeeperSettings(run, project, name, zone, since=run.keeper_at or 0.0)
    bundle = make_keeper_bundle(run, settings, local, secrets, identity)
    reporter.info(f"starting the keeper {name}: {machine} in {zone}, ${run.keeper_usd_per_hour:.2f}/h")
    until = provider.now() + LIMIT_SECONDS
    problem = "it was not ready"
    delivered = False
    try:
        while provider.now() < until:
            try:
                status = provider.status(name, zone)
                if status.state is SliceState.ABSENT:
                    provider.create(request)
                elif status.state in (SliceState.FAILED, SliceState.STOPPED, SliceState.PREEMPTED):
                    provider.delete(name, zone)
                elif status.state is SliceState.READY and not delivered:
                    problem = "it does not answer to ssh"
                    _deliver(bundle, provider, name, zone, identity, reporter)
                    delivered, problem = True, "it does not control the run"
                elif delivered and _controls(files, provider.now()):
                    reporter.info("the keeper controls the run")
                    return
            except CloudUnavailable as error:
                problem = str(error)
            sleep(POLL_SECONDS)
    except RequestRefused as refused:
        problem = str(refused)
    provider.delete(name, zone)
    raise UserError(
        "E-CLOUD-063",
        f"the keeper {name} did not start in {zone}",
        why=problem,
        fix="run without --keeper: then this machine controls the run; or see forerun doctor --cloud",
    )


def remove_keeper(run: CloudRun, provider: Provider) -> None:
    """Delete the keeper of a run, if it exists. It deletes itself too."""
    for resource in provider.list():
        found = resource.labels
        if found.get(labels.RUN) == labels.run_label(run.name) and found.get(labels.ROLE) == labels.KEEPER_ROLE:
            provider.delete(resource.name, resource.zone)


def _deliver(bundle: Bundle, provider: Provider, name: str, zone: str, identity: Path, reporter: Reporter) -> None:
    hosts, keys = provider.addresses(name, zone), provider.host_keys(name, zone)
    if not hosts or not keys:
        raise CloudUnavailable(f"the address or the host key of {name} is not known yet")
    deliver(bundle, hosts, keys, identity, reporter, limit_seconds=SSH_SECONDS)


def _controls(files: RunFiles, now: float) -> bool:
    lease = undamaged(files.lease())
    return lease is not None and lease.holder.startswith(f"{HOLDER}:") and lease.is_held(now)


def keeper_request(
    run: CloudRun, zone: str, machine: str, metadata: Mapping[str, str], limit_seconds: int | None
) -> SliceRequest:
    """Return the request for the keeper of a run. A run has at most one, so its name needs no number.

    Args:
      limit_seconds: after this time, the API deletes the keeper.
    """
    price = f"{KEEPER_USD_PER_HOUR:.6g}"
    return SliceRequest(
        name=keeper_name(run.name),
        slice=machine,
        zone=zone,
        capacity="on-demand",
        labels={labels.RUN: labels.run_label(run.name), labels.ROLE: labels.KEEPER_ROLE},
        metadata={**metadata, labels.FOLDER: run.folder, labels.USD_PER_HOUR: price},
        # A keeper that is started again after its deletion needs another request ID.
        request_id=labels.request_id(run.folder, 0, f"keeper {zone} {run.keeper_at}"),
        limit_seconds=limit_seconds,
        service_account=run.service_account,
        network=run.network,
        subnetwork=run.subnetwork,
        internal_only=run.internal_only,
    )


def keeper_name(run: str) -> str:
    return f"{labels.PREFIX}-{labels.run_label(run)}-keeper"


def keeper_place(provider: ComputeProvider, zone: str) -> tuple[str, str]:
    """Return (zone, machine type) for the keeper of a run in `zone`.

    The bucket of a run is in the region of its slice, so the keeper is in the same region. Zones that only have TPUs
    may lack small machines; then another zone of the region is used.

    Raises:
      UserError: No zone of the region has one of the machine types.
    """
    calls = provider.calls
    region = calls.find(f"projects/{provider.rest.project}/regions/{region_of(zone)}", Region) or {}
    others = sorted(last_part(link) for link in region.get("zones") or ())
    zones = [zone, *(one for one in others if one != zone)]
    for machine in KEEPER_MACHINES:
        for one in zones:
            if calls.find(f"{calls.zone_path(one)}/machineTypes/{machine}") is not None:
                return one, machine
    raise UserError(
        "E-CLOUD-023",
        f"no zone of {region_of(zone)} has a small machine for the keeper",
        why=f"asked {', '.join(zones)} for {', '.join(KEEPER_MACHINES)}",
        fix="choose a slice in another region, or run without --keeper",
    )


def make_keeper_bundle(
    run: CloudRun, settings: KeeperSettings, local: JobFiles, secrets: Mapping[str, str], identity: Path
) -> Bundle:
    """Return the files of a keeper. The startup script of a host installs them, so that their names are the same.

    The unit of the agent runs the controller; the unit of the training does nothing. The file `secret` contains the
    private key with which the keeper reaches the hosts.
    """
    units = {name: (UNITS / name).read_bytes() for name in (AGENT_UNIT, TRAIN_UNIT)}
    return machine_bundle(
        run.job,
        local,
        build_wheel(),
        locked_requirements(DEVICE, planned_python(run)),
        identity.read_bytes(),
        secrets,
        replace(settings, overrides=local.overrides).to_json(),
        units,
    )
