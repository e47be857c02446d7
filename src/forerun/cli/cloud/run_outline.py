"""The options of `forerun run`, and the record of the run that they describe."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Count, Dollars, File, Name, Project, Slice, Value, Zones, comma_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.cloud.provider import Capacity
    from forerun.cloud.record.entries import CloudRun, Option
    from forerun.config.load import LoadedJob


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `forerun run` rents, and when it ends.

    Attributes:
      on: slice to rent, such as v6e-8, a GPU machine type, or ssh:machines.yaml (default: the plan's best)
      alternatives: other slices to try without capacity, for example v5e-16
      goal: without `on`: what the plan optimises for
      spot: rent spot capacity, which the cloud may take back
      flex_start: wait in the queue for flex-start capacity
      reservation: use this reservation of the project
      max_usd: stop with a checkpoint before the run costs more than this
      zones: zones to try, in order (default: the 4 cheapest)
      bucket: bucket folder for checkpoints and results, such as gs://my-bucket/runs (default: checkpoint.folder)
      keeper: run the controller on a small VM, so that this machine may be off
      no_wait: end when the hosts train; without `keeper`, nothing replaces a preempted slice then
      wait_seconds: wait this long for capacity in a zone (default: 600 with alternatives, else without a limit)
      prices: CSV file of prices that replace the table's
      usd_per_hour: price of the slice, if the table has none
      provider: Cloud TPU API or Compute Engine (default: tpu if possible)
      disk_gib: size of the boot disk in GiB
      image: runtime version or image of the hosts
      network: network of the hosts (default: default)
      subnetwork: subnetwork of the hosts
      service_account: service account of the hosts
      internal_ips: rent hosts without external addresses
      tunnel_through_iap: reach hosts through Identity-Aware Proxy
      no_export: do not export the model at the end
    """

    on: Slice | None = None
    alternatives: Annotated[Sequence[str], Value("SLICES", comma_list, option="or")] = ()
    goal: Literal["cheapest", "fastest", "balanced"] = "balanced"
    spot: Annotated[bool, Value(group="capacity")] = False
    flex_start: Annotated[bool, Value(group="capacity")] = False
    reservation: Annotated[str, Value("NAME", group="capacity")] | None = None
    max_usd: Dollars | None = None
    zones: Zones = ()
    project: Project | None = None
    bucket: Annotated[str, Value("ADDRESS")] | None = None
    keeper: bool = False
    no_wait: bool = False
    wait_seconds: Count | None = None
    prices: File | None = None
    usd_per_hour: Dollars | None = None
    provider: Literal["tpu", "compute"] | None = None
    disk_gib: Count | None = None
    image: Name | None = None
    network: Name | None = None
    subnetwork: Name | None = None
    service_account: Annotated[str, Value("EMAIL")] | None = None
    internal_ips: bool = False
    tunnel_through_iap: bool = False
    no_export: bool = False


SSH = "ssh:"
CAP_FACTOR = 2  # without --max-usd, the cap is this multiple of the planned cost


def outline(options: RunOptions, loaded: LoadedJob, overrides: Sequence[str]) -> CloudRun:
    """Return the record of the run that the options and the job describe. Nothing is created.

    Raises:
      UserError: The job has no bucket, no slice fits, no price is known, or the cap is too small.
    """
    from forerun.cloud.control.offers import is_gpu_machine
    from forerun.cloud.keeper.keeper_start import KEEPER_USD_PER_HOUR
    from forerun.cloud.labels import run_label
    from forerun.cloud.record.entries import CloudRun

    job = loaded.job
    run_label(job.name)  # raises if the name cannot name resources
    folder = _bucket_folder(options, loaded)
    steps = job.steps
    on_cpu = job.device == "cpu" or job.device == ("cpu",)
    rows: dict[str, dict[str, Any]] = {}
    names = [options.on, *options.alternatives] if options.on else []
    slices = [] if on_cpu or any(name.startswith(SSH) for name in names) else _planned_slices(names)
    if slices or not (on_cpu or names):
        by_slice, steps = _planned(options, loaded, list(dict.fromkeys(slices)))
        pairs = list(zip(names, slices, strict=True)) if slices else [(one, one) for one in by_slice]
        rows = {name: by_slice[slice_] for name, slice_ in pairs if slice_ in by_slice}
        names = list(rows)
    elif not names:
        raise UserError(
            "E-CLOUD-056",
            "forerun run needs --on for a job with device: cpu",
            why="the plan compares TPU slices, and this job does not use them",
            fix="add --on v5e-8, or remove `device: cpu` from the job",
        )
    offers = _offers(options, names, rows)
    max_usd = _cap(options, offers)
    device = "cpu" if on_cpu else "gpu" if is_gpu_machine(offers[0].slice) else "tpu"
    if options.on and options.on.startswith(SSH):
        device = _machine_device(loaded)
    return CloudRun(
        name=job.name,
        folder=folder,
        job=loaded.path.read_text(encoding="utf-8"),
        options=tuple(offers),
        max_usd=max_usd,
        created_at=0.0,
        device=device,
        arguments=tuple(overrides),
        versions=_versions(),
        total_steps=steps,
        export=not options.no_export,
        keeper=options.keeper,
        image=options.image,
        disk_gib=options.disk_gib,
        network=options.network,
        subnetwork=options.subnetwork,
        service_account=options.service_account,
        reservation=options.reservation,
        internal_only=options.internal_ips,
        wait_seconds=options.wait_seconds,
        keeper_usd_per_hour=KEEPER_USD_PER_HOUR if options.keeper else 0.0,
    )


def _bucket_folder(options: RunOptions, loaded: LoadedJob) -> str:
    from forerun.storage.address import Address

    folder = options.bucket or loaded.job.checkpoint.folder
    if folder is None or not Address.of(folder).is_bucket:
        raise UserError(
            "E-CLOUD-054",
            "the job needs a bucket for its checkpoints and results",
            why="rented machines are deleted with their disks, "
            + ("and checkpoint.folder is not set" if folder is None else f"and checkpoint.folder is {folder}"),
            fix="add --bucket gs://my-bucket/runs; create one with: gcloud storage buckets create gs://my-bucket",
        )
    return f"{folder.rstrip('/')}/{loaded.job.name}"


def _planned_slices(names: Sequence[str]) -> list[str]:
    """Return the slices to plan for `names`: `h100-8` for `a3-highgpu-8g`; empty if one of them cannot be planned."""
    from forerun.cloud.compute.machine_types import is_machine_type, planned_name, rented_name
    from forerun.hardware.slices import slice_named
    from forerun.planner.compile.installed_compilers import compiler_for

    found = []
    for name in names:
        rented_name(name)  # raises if it cannot be rented
        planned = planned_name(name) if is_machine_type(name) else name
        if planned is None:
            return []
        slice_ = slice_named(planned)
        if slice_.platform == "gpu":
            try:
                compiler_for(slice_).require()
            except UserError as error:
                LineReporter(sys.stderr).warn(f"{name} is not planned: {error.what}; {error.fix}")
                return []
        found.append(slice_.name)
    return found


def _planned(options: RunOptions, loaded: LoadedJob, names: Sequence[str]) -> tuple[dict[str, Any], int | None]:
    """Return the rows of the plan that fit, best first or in the order of --on and --or, and the steps of the job."""
    from forerun.cli.jobs import print_warnings
    from forerun.console import SafeConsole
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.plan import PIPED_COLUMNS, plan

    print_warnings(resolve_model(loaded.job))
    zone = options.zones[0] if options.zones and not options.prices else None
    # Without --on, compare TPU slices only: the cheapest GPU machines are of providers that `run` cannot rent from.
    job = loaded.job if names or loaded.job.device != "auto" else loaded.job.model_copy(update={"device": "tpu"})
    # A price file may have other providers, for machines that the user rents in another way.
    provider = () if options.prices else "gcp"
    found = plan(job, on=names or None, goal=options.goal, zone=zone, provider=provider, prices=options.prices)
    found.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS))
    found.require_fit()
    rows = {row["slice"]: row for row in found.rows if row["fits"] and not row["changes"]}
    if not names:
        best = next(iter(rows), None)
        rows = {} if best is None else {best: rows[best]}
    if not rows:
        raise UserError(
            "E-CLOUD-057",
            "the job fits no slice without a change",
            why="the plan above shows changes that make it fit",
            fix="change the job as the plan shows, then run it",
        )
    from forerun.hardware.slices import slice_named

    order = [slice_named(name).name for name in names] or list(rows)
    missing = [name for name in order if name not in rows]
    if missing and missing[0] == order[0]:
        raise UserError(
            "E-CLOUD-058",
            f"the job does not fit {missing[0]}",
            why=f"the plan above has its memory; it fits {', '.join(rows)}",
            fix=f"--on {next(iter(rows))}",
        )
    for name in missing:
        LineReporter(sys.stderr).warn(f"{name} is omitted: the job does not fit it")
    return {name: rows[name] for name in order if name in rows}, found.job.steps


def _offers(options: RunOptions, names: Sequence[str], rows: dict[str, dict[str, Any]]) -> list[Option]:
    from forerun.cloud.control.offers import slice_offers

    capacity: Capacity = "on-demand"
    if options.spot:
        capacity = "spot"
    elif options.flex_start:
        capacity = "flex-start"
    elif options.reservation:
        capacity = "reservation"
    if names[0].startswith(SSH):
        from forerun.cloud.ssh.ssh_provider import machine_option

        return [machine_option(names[0].removeprefix(SSH))]
    return [
        option
        for name in names
        for option in slice_offers(
            name,
            capacity,
            options.zones,
            row=rows.get(name),
            prices_file=None if options.prices is None else os.fspath(options.prices),
            provider=options.provider,
            usd_per_hour=options.usd_per_hour,
        )
    ]


def _machine_device(loaded: LoadedJob) -> str:
    """Return the device of the user's machines. It selects the packages that are installed there."""
    device = loaded.job.device
    if not isinstance(device, str) or device == "auto":
        raise UserError(
            "E-CLOUD-064",
            "a run on existing machines needs the device",
            why="packages for TPUs, GPUs and CPUs differ, and the job has device: auto",
            fix="add device=tpu, device=gpu or device=cpu",
        )
    return device


def _cap(options: RunOptions, offers: Sequence[Option]) -> float | None:
    """Return the cap: that of the user, else a multiple of the planned cost; None for machines that cost nothing."""
    from forerun.cloud.control.billing import least_usd

    if all(offer.usd_per_hour == 0 for offer in offers):
        return None
    cap: float | None = options.max_usd
    first = offers[0]
    if cap is None and first.hours is not None:
        cap = float(math.ceil(max(CAP_FACTOR * first.hours * first.usd_per_hour, least_usd(first.usd_per_hour))))
    if cap is None:
        raise UserError(
            "E-CLOUD-059",
            "forerun run needs --max-usd here",
            why="the time of this job was not planned, so its cost is unknown",
            fix="add a cap, for example --max-usd 10",
        )
    if cap < least_usd(first.usd_per_hour):
        raise UserError(
            "E-CLOUD-060",
            f"--max-usd {cap:g} is not enough to start",
            why=f"{first.slice} costs ${first.usd_per_hour:.2f} an hour, and a run that must save in time needs "
            f"${least_usd(first.usd_per_hour):.2f}",
            fix=f"--max-usd {math.ceil(2 * least_usd(first.usd_per_hour))}, or a smaller slice",
        )
    return cap


def _versions() -> dict[str, str]:
    from forerun.cloud.setup.wheel import WHEEL, keep_wheel

    found = {"python": platform.python_version(), WHEEL: keep_wheel()}
    for name in ("forerun", "jax", "jaxlib", "libtpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
