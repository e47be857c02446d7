"""Folders of runs with records that are written by hand, so that a test knows every value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from forerun.config.load import dump, load

START = 1_700_000_000.0
JOB = "model: {layers: 1, embed: 16, heads: 2}\ndata: /data/text\nsteps: 20\n"
TPU = {"platform": "tpu", "kind": "TPU v6 lite", "chip": "v6e", "count": 8}
CPU = {"platform": "cpu", "kind": "cpu", "chip": None, "count": 1}

Row = dict[str, Any]


def metrics_rows(steps: int = 20, drop: float = 0.1) -> list[Row]:
    """Return a row per step, one second each: the loss falls from 5 by `drop` per step."""
    return [
        {
            "step": step,
            "loss": 5.0 - drop * step,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "step_seconds": 0.5,
            "tokens_per_second": 1000.0,
            "wait_share": 0.01,
            "unix_seconds": START + step,
            **({"validation_loss": 5.5 - drop * step} if step % 10 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]


def write_run(
    folder: Path,
    rows: Sequence[Row],
    *,
    job: str = JOB,
    summary: Row | None = None,
    events: Sequence[Row] = (),
    skips: Sequence[Row] = (),
    exports: Sequence[Row] = (),
) -> Path:
    """Write the records of a run and return its folder, whose name is that of the job."""
    folder.mkdir(parents=True)
    source = folder / "source.yaml"
    source.write_text(f"name: {folder.name}\n{job}")
    (folder / "job.yaml").write_text(dump(load(source).job))
    for name, lines in (("metrics", rows), ("events", events), ("skips", skips), ("exports", exports)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class PageContent(HTMLParser):
    """The tags, the attributes, the texts and the tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            if "td" in self._open or "th" in self._open:
                self.rows[-1][-1] += data.strip()
            if data.strip():
                self.texts.append(data.strip())

    def curves(self, title: str) -> dict[str, list[tuple[float, float]]]:
        """Return the points of each curve of a chart: the drawing, scaled back by the chart's axes."""
        found: dict[str, list[tuple[float, float]]] = {}
        axes: tuple[list[float], list[float]] | None = None
        for tag, attributes in self.tags:
            if tag == "figure":
                axes = None
                x, y = (str(attributes.get(name)).split() for name in ("data-x", "data-y"))
                ranges = [float(x[0]), float(x[1])], [float(y[0]), float(y[1])]
            if tag == "svg" and str(attributes.get("aria-label")).startswith(f"{title} by "):
                axes = ranges
            if tag == "path" and axes:
                numbers = [int(n) / 100_000 for n in _numbers(str(attributes["d"]))]
                (x0, x1), (y0, y1) = axes
                points = zip(numbers[::2], numbers[1::2], strict=True)
                found[str(attributes["data-name"])] = [
                    (x0 + a * (x1 - x0), y0 + (1 - b) * (y1 - y0)) for a, b in points
                ]
        return found


def _numbers(path: str) -> list[str]:
    return path.replace("M", " ").replace("L", " ").replace("z", " ").split()
