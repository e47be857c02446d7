"""The requests with which a machine deletes its own slice before an agent runs on it.

A request that waited in a queue may become a machine when no controller exists any more. Its job never arrives, so the
agent, which enforces the deadline, is never installed. Without these requests, the machine would be billed until its
owner notices it.
"""

from __future__ import annotations

from forerun.cloud.record.entries import AttemptEntry

PROJECT = "PROJECT"  # the startup script replaces it by the project of the metadata server, if it is not known here


def deletion_paths(attempt: AttemptEntry, project: str | None) -> list[str]:
    """Return `API PATH` of each request. Those that do not exist are refused, which does no harm.

    The controller or `forerun down` removes what these requests leave, such as templates. That costs nothing.
    """
    place, name = attempt.option.zone, attempt.resource
    match attempt.option.provider:
        case "tpu":
            parent = f"v2/projects/{project or PROJECT}/locations/{place}"
            return [f"tpu {parent}/queuedResources/{name}?force=true", f"tpu {parent}/nodes/{name}"]
        case "compute":
            parent = f"projects/{project or PROJECT}/zones/{place}"
            return [f"compute {parent}/instanceGroupManagers/{name}", f"compute {parent}/instances/{name}"]
        case _:
            return []  # machines that are not rented
