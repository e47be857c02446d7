"""The small machine on which the controller of a run with `--keeper` runs."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import region_of
from forerun.cloud.compute.compute_answers import Region
from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.compute.states import last_part
from forerun.cloud.provider import SliceRequest
from forerun.errors import UserError

KEEPER_MACHINES = ("e2-small", "n2-standard-2", "n1-standard-1")  # in the order of preference
KEEPER_USD_PER_HOUR = 0.12  # an upper bound of the price of these machines in the regions that have TPUs


def keeper_name(run: str) -> str:
    """Return the name of a run's keeper. A run has at most one, so that it needs no number."""
    return f"{cloud_labels.PREFIX}-{cloud_labels.run_label(run)}-keeper"


def keeper_request(
    run: str,
    folder: str,
    place: tuple[str, str],
    metadata: Mapping[str, str],
    *,
    limit_seconds: int | None = None,
    service_account: str | None = None,
    network: str | None = None,
    subnetwork: str | None = None,
    internal_only: bool = False,
) -> SliceRequest:
    """Return the request for the keeper of a run.

    Args:
      run: the name of the run.
      folder: the bucket folder of the run.
      place: (zone, machine type), as `keeper_place` returns it.
      limit_seconds: after this time, the API deletes the keeper.
    """
    zone, machine = place
    return SliceRequest(
        name=keeper_name(run),
        slice=machine,
        zone=zone,
        capacity="on-demand",
        labels={cloud_labels.RUN: cloud_labels.run_label(run), cloud_labels.ROLE: cloud_labels.KEEPER_ROLE},
        metadata={
            **metadata,
            cloud_labels.FOLDER: folder,
            cloud_labels.USD_PER_HOUR: f"{KEEPER_USD_PER_HOUR:.6g}",
        },
        request_id=cloud_labels.request_id(folder, 0, f"keeper {zone}"),
        limit_seconds=limit_seconds,
        service_account=service_account,
        network=network,
        subnetwork=subnetwork,
        internal_only=internal_only,
    )


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
