"""The environment variables that libtpu needs on a host of several slices.

Google Cloud sets them for queued resources with several nodes and in GKE. `jax/_src/clusters/cloud_tpu_cluster.py`
reads the same names.
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import UserError
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.messages import StartWorker

ADDRESS, COUNT, NUMBER = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"


def slice_variables(hosts: Hosts, slices: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker while all slices take part, or an empty dictionary if it needs none.

    The hosts of a slice have consecutive numbers, and host 0 is the coordinator. Variables of the cloud are kept.

    Args:
        hosts: The place of this host in the run.
        slices: The job's `mesh.slices`. None means that the cloud sets the variables if there are several slices.
        environment: The environment of the supervisor.

    Raises:
        UserError: The hosts do not divide into slices, or the environment has another number of slices.
    """
    if slices in (None, 1) or hosts.count == 1:  # one host with several slices has virtual devices
        return {}
    assert slices is not None
    known = environment.get(COUNT)
    if hosts.count % slices or known not in (None, "", str(slices)):
        reason = f"{COUNT}={known}" if known else "all slices have the same number of hosts"
        raise UserError(
            "E-HOSTS-034",
            f"mesh.slices={slices} does not match the {hosts.count} hosts of this run",
            why=reason,
            fix="start the hosts of all slices, one slice after the other, and set mesh.slices to the number of slices",
        )
    if known:
        return {}
    own = hosts.index // (hosts.count // slices)
    return {ADDRESS: hosts.leader, COUNT: str(slices), NUMBER: str(own)}


def attempt_variables(
    hosts: Hosts, slices: int | None, environment: Mapping[str, str], order: StartWorker
) -> dict[str, str]:
    """Return the variables of the worker of one attempt, in which some slices may not take part.

    The remaining slices are numbered anew, so the variables of the cloud are replaced then. The coordinator stays: the
    first slice takes part in every attempt. An empty value means that the variable is removed: one slice needs none.
    """
    if order.hosts == hosts.count or order.slices is None:
        return slice_variables(hosts, slices, environment)
    if order.slices == 1:
        return {ADDRESS: "", COUNT: "", NUMBER: ""}
    own = order.index // (order.hosts // order.slices)
    address = environment.get(ADDRESS) or hosts.leader
    return {ADDRESS: address, COUNT: str(order.slices), NUMBER: str(own)}
