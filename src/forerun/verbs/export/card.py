"""The model card of an exported run: job, data, losses, cost and the result of the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.files import atomic_write, read_regular
from forerun.hardware.prices import cheapest
from forerun.hub.names import is_folder
from forerun.hub.snapshot import Snapshot
from forerun.run_folder.run_folder import RunFolder
from forerun.safe_text import redact
from forerun.track.metrics import read_metrics
from forerun.units import MIB
from forerun.weights_io.card import CURVE, ModelCard, card, curve


def write_card(
    folder: Path, run: RunFolder, job: Job, base: Snapshot | None, proof: str, library: str = "transformers"
) -> None:
    """Write the model card and the loss curve of an exported run."""
    summary = json.loads(read_regular(run.summary, MIB)) if run.summary.exists() else {}
    taken = [line for line in read_metrics(run.metrics) if line.get("loss") is not None]
    losses = [(int(line["step"]), float(line["loss"])) for line in taken]
    counted = {"steps": losses[-1][0] if losses else 0, "tokens": 0, "parameters": 0, **summary}
    story = ModelCard(
        name=job.name,
        base=public_name(job.model.name or "") if base else None,
        revision=base.revision if base else None,
        job=_as_written(job),
        data=[Path(redact(part.path)).name for part in job.data.parts.values()],
        sequence=job.sequence,
        summary=counted,
        losses=losses,
        cost=_cost(counted),
        proof=proof,
        library=library,
    )
    atomic_write(folder / CURVE, curve(losses, counted.get("loss_unit", "nats per token")))
    atomic_write(folder / "README.md", card(story))


def _as_written(job: Job) -> str:
    """Return the values that differ from their defaults, without paths of this machine."""
    given = job.data.model_dump(include={"path", "tokenizer", "chat_template"})
    data = {name: value and public_name(value) for name, value in given.items()}
    mixture = {
        name: part.model_copy(update={"path": public_name(part.path)}) for name, part in job.data.mixture.items()
    }
    public = {
        "model": job.model.model_copy(update={"name": job.model.name and public_name(job.model.name)}),
        "data": job.data.model_copy(update={**data, "mixture": mixture, "store": None}),
        "runs": type(job).model_fields["runs"].default,
    }
    start = job.method.initial_adapter
    return dump(job.model_copy(update=public).with_initial_adapter(start and public_name(start)), defaults=False)


def public_name(name: str) -> str:
    """Return the name of a model without the folders of this machine."""
    return Path(name).name if is_folder(name) else name


def _cost(summary: dict[str, Any]) -> str:
    """Return the measured hours times the list price as text, if a price is known."""
    device, seconds = summary.get("device") or {}, summary.get("train_seconds")
    price = cheapest(device["chip"], hosts=1) if device.get("chip") and seconds else None
    if price is None or not seconds:
        return "no price is known for this device"
    usd = seconds / 3600 * device["count"] * price.usd_per_chip_hour_on_demand
    return f"${usd:,.2f} at the list price of {price.date} in {price.place}, on demand"
