"""`forerun doctor`: find problems of this machine or of a Google Cloud project, and print how to fix them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.cloud.cloud_checks import CloudNeed
    from forerun.config.load import LoadedJob


def run(args: argparse.Namespace) -> int:
    from forerun.doctor import report

    _require_matching_options(args)
    if args.cloud:
        return _run_cloud(args)
    return report.run(smoke=args.smoke, overrides=args.overrides)


def _require_matching_options(args: argparse.Namespace) -> None:
    from forerun.errors import UserError

    given = {"--on": args.on, "--spot": args.spot, "--zones": args.zones, "--project": args.project}
    lost = [name for name, value in {**given, "--disk-gib": args.disk_gib}.items() if value]
    if args.cloud and args.smoke:
        lost = ["--smoke"]
    if lost and (args.smoke or not args.cloud):
        raise UserError(
            "E-CLOUD-090",
            f"{lost[0]} {'cannot be used with' if args.cloud else 'needs'} --cloud",
            why="`forerun doctor` checks this machine, and `forerun doctor --cloud` checks a Google Cloud project",
            fix="forerun doctor --cloud job.yaml --on v6e-8, or forerun doctor --smoke",
        )


def _run_cloud(args: argparse.Namespace) -> int:
    from forerun.cloud.cloud_checks import cloud_checks
    from forerun.doctor.machine import Finding
    from forerun.doctor.report import line, verdict
    from forerun.exit_codes import USER_MISTAKE

    findings = []
    for one in cloud_checks(_need(args), args.project):
        findings.append(Finding(one.name, one.status, one.found, one.fix))
        print(line(findings[-1]), flush=True)
    print(verdict(findings))
    return USER_MISTAKE if any(finding.status == "FAIL" for finding in findings) else 0


def _need(args: argparse.Namespace) -> CloudNeed:
    """Return what the job and the options need. Nothing is planned, so that the check takes seconds."""
    from forerun.cloud.cloud_checks import CloudNeed
    from forerun.cloud.compute.machine_types import is_machine_type, rented_name
    from forerun.hardware.slices import slice_named
    from forerun.verbs.job_files import open_job

    words = list(args.overrides)
    job = open_job(words[0], words[1:]) if words else None
    values: dict[str, Any] = {"zones": tuple(args.zones), "disk_gib": args.disk_gib}
    if args.spot:
        values["capacity"] = "spot"
    if args.on:
        name = rented_name(args.on)
        values |= {"slice": name, "zones": tuple(args.zones) or tuple(_cheapest_zones(name, spot=args.spot))}
        if is_machine_type(name) or slice_named(name).chip.name == "tpu7x":
            values["provider"] = "compute"
        if not is_machine_type(name):
            values["hosts"] = slice_named(name).hosts
    if job is not None:
        values |= _job_values(job, tuple(words[1:]))
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
