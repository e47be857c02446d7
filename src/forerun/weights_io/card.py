"""The model card of an export: model, data, loss curve, time and cost, all from the records of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from forerun.hub.names import is_repository
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
    data: Sequence[str]  # names of files or addresses
    sequence: int  # tokens
    summary: Mapping[str, Any]
    losses: Sequence[tuple[int, float]]  # step, nats per token
    cost: str
    proof: str
    library: str = "transformers"


def card(story: ModelCard) -> str:
    """Return the text of the README.md.

    Names come from a job and from the folder of a checkpoint, so each is escaped for its place: they must not add keys
    to the header, which the hub reads, nor text outside of their cell, code span or code block.
    """
    s = story.summary
    header = {"library_name": story.library}
    if story.base is not None and is_repository(story.base):
        header["base_model"] = story.base
    origin = f"Started from {_code(story.base)}" if story.base else "Trained from scratch"
    if story.revision:
        origin += f" at {_code(story.revision)}"
    job = story.job.rstrip()
    fence = "`" * max(3, _longest_backticks(job) + 1)
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {_text(story.name)}",
        "",
        f"{origin} with forerun: {s['steps']:,} steps, {s['tokens']:,} tokens, {s['parameters']:,} parameters.",
        "",
        f"![Training loss]({CURVE})",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {_text(value)} |" for key, value in _figures(story)),
        "",
        "## Data",
        "",
        f"{', '.join(_code(source) for source in story.data)}, {story.sequence} tokens a sequence.",
        "",
        "## Proof",
        "",
        story.proof,
        "",
        "## Job",
        "",
        f"{fence}yaml",
        job,
        fence,
    ]
    return clean("\n".join(lines)) + "\n"


def _text(value: str) -> str:
    """Return text as one line of Markdown without markup, also in a cell of a table."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """Return text as a code span. Its fence is longer than all backticks in the text."""
    line = " ".join(value.split())
    fence = "`" * (_longest_backticks(line) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


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
    return [*rows, ("cost", story.cost), ("program", str(s.get("program")))]


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
