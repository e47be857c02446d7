"""The model card: what was trained, on what, how the loss fell, what it took. Every figure is the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from forerun.safe_text import clean

CURVE = "loss.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 720, 300, 56, 36, 14
SHOWN_POINTS = 400


@dataclass(frozen=True)
class Story:
    """What the card tells."""

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


def card(story: Story) -> str:
    """README.md of the folder."""
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
    return base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~"))


def _figures(story: Story) -> list[tuple[str, str]]:
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
    """The loss over the steps as an SVG of its own."""
    points = losses[:: max(1, len(losses) // SHOWN_POINTS)] or [(0, 0.0)]
    steps, values = [step for step, _ in points], [loss for _, loss in points]
    low, high = min(values), max(values)
    span, last = (high - low) or 1.0, max(steps[-1] - steps[0], 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - EDGE) * (step - steps[0]) / last

    def y(loss: float) -> float:
        return EDGE + (HEIGHT - BOTTOM - EDGE) * (high - loss) / span

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    marks = [low + span * n / 4 for n in range(5)]
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - EDGE}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.2f}</text>'
        for mark in marks
    )
    ends = "".join(
        f'<text x="{x(step):.1f}" y="{HEIGHT - 14}" text-anchor="{anchor}">{escape(str(step))}</text>'
        for step, anchor in ((steps[0], "start"), (steps[-1], "end"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="100%" height="100%" fill="#fff"/>{grid}{ends}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">step</text>'
        f'<text x="{LEFT}" y="{EDGE - 3}">{escape(unit)}</text>'
        f'<polyline points="{line}" fill="none" stroke="#3366cc" stroke-width="2"/></svg>\n'
    )
