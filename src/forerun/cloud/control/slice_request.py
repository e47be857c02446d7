"""The request for the slice of an attempt. It is a function of the record: every controller sends the same one."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.cloud import labels
from forerun.cloud.control.decide import WAIT_SECONDS
from forerun.cloud.provider import SliceRequest
from forerun.cloud.record.entries import AttemptEntry, CloudRun

SLACK_SECONDS = 60  # the controller gives up before the queue does


def slice_request(run: CloudRun, attempt: AttemptEntry, metadata: Mapping[str, str]) -> SliceRequest:
    """Return the request for the slice of an attempt. Its labels and metadata identify the run without local files."""
    wait = run.wait_seconds or (int(WAIT_SECONDS) if len(run.options) > 1 else None)
    shown = {
        labels.FOLDER: run.folder,
        labels.USD_PER_HOUR: f"{attempt.option.usd_per_hour:.6g}",
        labels.MAX_USD: "" if run.max_usd is None else f"{run.max_usd:.6g}",
    }
    return SliceRequest(
        name=attempt.resource,
        slice=attempt.option.slice,
        zone=attempt.option.zone,
        capacity=attempt.option.capacity,
        labels=labels.slice_labels(run.name, attempt.number),
        metadata={**{key: value for key, value in shown.items() if value}, **metadata},
        request_id=labels.request_id(run.folder, attempt.number, "create"),
        limit_seconds=attempt.limit_seconds,
        wait_seconds=None if wait is None else wait + SLACK_SECONDS,
        disk_gib=run.disk_gib,
        image=run.image,
        network=run.network,
        subnetwork=run.subnetwork,
        service_account=run.service_account,
        reservation=run.reservation,
        internal_only=run.internal_only,
    )
