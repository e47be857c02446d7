"""The start of a keeper from the user's machine, and its removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cloud import labels
from forerun.cloud.keeper.keeper_bundle import DEVICE, make_keeper_bundle
from forerun.cloud.keeper.keeper_process import HOLDER
from forerun.cloud.keeper.settings import KeeperSettings
from forerun.cloud.provider import CloudUnavailable, Provider, RequestRefused, SliceState
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import UserError
from forerun.reporter import Reporter

if TYPE_CHECKING:
    from forerun.cloud.compute.compute_provider import ComputeProvider
    from forerun.cloud.setup.job_files import JobFiles

POLL_SECONDS = 5.0
LIMIT_SECONDS = 1200.0  # until the keeper controls the run
SSH_SECONDS = 60.0


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
    from forerun.cloud.compute.keeper_machine import keeper_name, keeper_place, keeper_request
    from forerun.cloud.setup.self_deletion import deletion_paths
    from forerun.cloud.setup.startup import slice_metadata
    from forerun.cloud.ssh.keys import public_key

    if _controls(files, provider.now()):
        return
    zone, machine = keeper_place(provider, run.options[0].zone)
    name, project = keeper_name(run.name), provider.rest.project
    option = Option("compute", machine, zone, "on-demand", 1, run.keeper_usd_per_hour)
    attempt = AttemptEntry(0, option, name, provider.now(), None, 0.0)
    assert deletion_paths(attempt, project), "a keeper that is not set up deletes itself"
    metadata = slice_metadata(replace(run, device=DEVICE), attempt, public_key(identity), project)
    limit = int(run.max_usd / run.keeper_usd_per_hour * 3600) if run.max_usd and run.keeper_usd_per_hour else None
    request = keeper_request(
        run.name,
        run.folder,
        (zone, machine),
        metadata,
        limit_seconds=limit,
        service_account=run.service_account,
        network=run.network,
        subnetwork=run.subnetwork,
        internal_only=run.internal_only,
    )
    # A keeper that is started again after its deletion needs another request ID.
    request = replace(request, request_id=labels.request_id(run.folder, 0, f"keeper {zone} {run.keeper_at}"))
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


def _deliver(bundle: object, provider: Provider, name: str, zone: str, identity: Path, reporter: Reporter) -> None:
    from forerun.cloud.ssh.delivery import deliver

    hosts, keys = provider.addresses(name, zone), provider.host_keys(name, zone)
    if not hosts or not keys:
        raise CloudUnavailable(f"the address or the host key of {name} is not known yet")
    deliver(bundle, hosts, keys, identity, reporter, limit_seconds=SSH_SECONDS)  # type: ignore[arg-type]


def _controls(files: RunFiles, now: float) -> bool:
    lease = undamaged(files.lease())
    return lease is not None and lease.holder.startswith(f"{HOLDER}:") and lease.is_held(now)
