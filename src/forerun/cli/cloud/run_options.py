"""The options of `forerun run` that describe the machines and the limits of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from forerun.verbs.option_types import Count, Dollars, File, Name, Project, Slice, Value, Zones, comma_list


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
