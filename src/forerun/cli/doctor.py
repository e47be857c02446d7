"""`forerun doctor`: find problems of this machine or of a Google Cloud project, and print how to fix them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.verbs.option_types import Count, Override, Project, Slice, Zones

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.cloud.cloud_checks import CloudNeed
    from forerun.config.load import LoadedJob


def doctor(
    *overrides: Override,
    smoke: bool = False,
    cloud: bool = False,
    on: Slice | None = None,
    spot: bool = False,
    zones: Zones = (),
    project: Project | None = None,
    disk_gib: Count | None = None,
) -> int:
    """Check this machine, or a Google Cloud project, and print how to fix the problems.

    Args:
      *overrides: with `smoke`: set device, devices or mesh, for example device=tpu; with `cloud`: a job and its values
      smoke: also train for a minute on the devices of this machine
      cloud: check what forerun run needs, instead of this machine; nothing is rented
      on: with `cloud`: slice to rent, for example v6e-8: also check its quota
      spot: with `cloud`: check the quota for spot capacity
      zones: with `cloud`: zones to check
      project: with `cloud`: Google Cloud project (default: that of your login)
      disk_gib: with `cloud`: size of the boot disk in GiB
    """
    from forerun.errors import UserError

    for_cloud = {"--on": on, "--spot": spot, "--zones": zones, "--project": project, "--disk-gib": disk_gib}
    conflicts = ["--smoke"] if cloud and smoke else [name for name, value in for_cloud.items() if value]
    if conflicts and (smoke or not cloud):
        raise UserError(
            "E-CLOUD-090",
            f"{conflicts[0]} {'cannot be used with' if cloud else 'needs'} --cloud",
            why="`forerun doctor` checks this machine, and `forerun doctor --cloud` checks a Google Cloud project",
            fix="forerun doctor --cloud job.yaml --on v6e-8, or forerun doctor --smoke",
        )
    from forerun.doctor import checks

    if not cloud:
        return checks.run(smoke=smoke, overrides=overrides)
    from forerun.cloud.cloud_checks import cloud_checks
    from forerun.doctor.machine import Finding
    from forerun.exit_codes import USER_MISTAKE

    findings = []
    for check in cloud_checks(_need(overrides, on, spot, tuple(zones), disk_gib), project):
        findings.append(Finding(check.name, check.status, check.found, check.fix))
        print(checks.line(findings[-1]), flush=True)
    print(checks.verdict(findings))
    return USER_MISTAKE if any(finding.status == "FAIL" for finding in findings) else 0


def _need(
    overrides: Sequence[str], on: str | None, spot: bool, zones: tuple[str, ...], disk_gib: int | None
) -> CloudNeed:
    """Return what the job and the options need. Nothing is planned, so that the check takes seconds."""
    from forerun.cloud.cloud_checks import CloudNeed
    from forerun.cloud.compute.machine_types import is_machine_type, rented_name
    from forerun.hardware.slices import slice_named
    from forerun.verbs.job_files import open_job

    job = open_job(overrides[0], overrides[1:]) if overrides else None
    values: dict[str, Any] = {"zones": zones, "disk_gib": disk_gib}
    if spot:
        values["capacity"] = "spot"
    if on:
        name = rented_name(on)
        values |= {"slice": name, "zones": zones or tuple(_cheapest_zones(name, spot=spot))}
        if is_machine_type(name) or slice_named(name).chip.name == "tpu7x":
            values["provider"] = "compute"
        if not is_machine_type(name):
            values["hosts"] = slice_named(name).hosts
    if job is not None:
        values |= _job_values(job, tuple(overrides[1:]))
    return CloudNeed(**values)


def _cheapest_zones(name: str, *, spot: bool) -> list[str]:
    from forerun.cloud.compute.machine_types import is_machine_type
    from forerun.cloud.control.offers import slice_offers

    if is_machine_type(name):
        return []  # without prices of GPU machines, only --zones names zones
    return [option.zone for option in slice_offers(name, "spot" if spot else "on-demand")]


def _job_values(loaded: LoadedJob, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the bucket of a job and the size of its data."""
    from forerun.cloud.setup.job_files import job_files
    from forerun.storage.address import Address

    tree = loaded.job.model_dump(mode="json")
    folder = Address.of(tree["checkpoint"].get("folder") or "")
    text = loaded.path.read_text(encoding="utf-8")
    files = job_files(text, loaded.path.resolve().parent, overrides, "/job").files
    return {
        "has_job": True,
        "bucket": folder.bucket if folder.protocol == "gs" else "",
        "data_bytes": sum(one.source.stat().st_size for one in files),
        "data_addresses": tuple(dict.fromkeys(_addresses(tree.get("data")))),
    }


def _addresses(value: object) -> Iterator[str]:
    """Yield the bucket addresses in a section of a job."""
    from forerun.storage.address import Address

    if isinstance(value, str) and Address.of(value).protocol == "gs":
        yield value
    elif isinstance(value, dict):
        # The token store is written to, not read from, a bucket.
        yield from (one for key, inner in value.items() if key != "store" for one in _addresses(inner))
    elif isinstance(value, list | tuple):
        yield from (one for inner in value for one in _addresses(inner))
