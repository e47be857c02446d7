"""The model card of an export: model, data, loss curve, time and cost, all from the records of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.pages.svg import Plot, Scale
from forerun.safe_text import clean

CURVE = "loss.svg"
SHOWN_POINTS = 400


@dataclass(frozen=True)
class ModelCard:
    """The contents of a model card."""

    name: str
    base: str | None  # the checkpoint it started from
    revision: str | None
    job: str  # YAML
    data: str
    summary: Mapping[str, Any]
    losses: Sequence[tuple[int, float]]  # step, nats per token
    cost: str
    proof: str
    library: str = "transformers"


def card(story: ModelCard) -> str:
    """Return the text of the README.md."""
    s = story.summary
    head = [
        "---",
        f"library_name: {story.library}",
        *([f"base_model: {story.base}"] if _on_hub(story.base) else []),
        "---",
    ]
    begun = f"Started from `{story.base}`" if story.base else "Trained from scratch"
    if story.revision:
        begun += f" at `{story.revision}`"
    lines = [
        *head,
        "",
        f"# {story.name}",
        "",
        f"{begun} with forerun: {s['steps']:,} steps, {s['tokens']:,} tokens, {s['parameters']:,} parameters.",
        "",
        f"![Training loss]({CURVE})",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in _figures(story)),
        "",
        "## Data",
        "",
        story.data,
        "",
        "## Proof",
        "",
        story.proof,
        "",
        "## Job",
        "",
        "```yaml",
        story.job.rstrip(),
        "```",
    ]
    return clean("\n".join(lines)) + "\n"


def _on_hub(base: str | None) -> bool:
    """Return whether the base is a hub name and not a local folder."""
    return base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~"))


def _figures(story: ModelCard) -> list[tuple[str, str]]:
    s = story.summary
    device = s.get("device") or {}
    rows = [
        (
            "loss",
            f"{_number(s.get('first_loss'))} -> {_number(s.get('final_loss'))} {s.get('loss_unit', 'nats per token')}",
        )
    ]
    rows.append(("device", f"{device.get('count')} x {device.get('kind')}, mesh {s.get('mesh')}"))
    if s.get("step_seconds"):
        rows.append(("step", f"{s['step_seconds']:.4g} s measured{_predicted(s)}"))
    if s.get("train_seconds"):
        rows.append(("training time", f"{s['train_seconds'] / 3600:.3g} hours in the last process"))
    return [*rows, ("cost", story.cost), ("program", f"`{s.get('program')}`")]


def _predicted(summary: Mapping[str, Any]) -> str:
    planned = summary.get("predicted_step_seconds")
    return f", {planned:.4g} s planned" if planned else ", no plan for this device"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def curve(losses: Sequence[tuple[int, float]], unit: str = "nats per token") -> str:
    """Return the loss over the steps as the text of an SVG file."""
    points = losses[:: max(1, len(losses) // SHOWN_POINTS)] or [(0, 0.0)]
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = (high - low) or 1.0
    plot = Plot((720, 300), Scale(first, last), Scale(low, low + span), f"loss in {unit}")
    plot.y_axis({mark: f"{mark:.2f}" for mark in (low + span * n / 4 for n in range(5))}, unit)
    plot.x_axis({first: str(first)}, anchor="start", grid=False)
    plot.x_axis({last: str(last)}, "step", anchor="end", grid=False)
    plot.line(points, "front")
    return plot.file_text()
