"""A comparison of runs: their results, their curves, and the values of their jobs that differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.pages.line_chart import Curve, LineChart, line_chart
from forerun.pages.render import render
from forerun.report.differences import differing_keys
from forerun.report.page import METRICS
from forerun.report.run_facts import RunFacts, run_facts
from forerun.report.run_files import Row
from forerun.report.run_record import RunRecord
from forerun.safe_text import redact
from forerun.units import Bytes, Seconds, Usd
from forerun.version import __version__

# The objective, with all of its settings: a DPO loss with another beta is another quantity.
_OBJECTIVE = re.compile(r"(objective|preferences|distil)(\.(?!cache$|where$).*)?|experts\.(balance|z)_loss")
_TOKENS = re.compile(r"data\.tokenizer")
# What the text of a source is, and which of its tokens have loss.
_TEXT = re.compile(
    r"data\.(mixture\.[^.]+\.)?(path|columns|separator|limit)(\..*)?"
    r"|data\.(loss_on|chat_template|apply_template|system|thinking|special_tokens|ignored_fields)"
)
_HELD_OUT = re.compile(r"data\.(validation|validation_by)")
_WEIGHTS = re.compile(r"data\.mixture\.[^.]+\.weight")
COLOURS = ("c0", "c2", "c3", "c5", "c1", "c4", "c6", "c7", "c8", "c9")  # neighbours differ clearly
VALIDATION = "validation_loss"


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared, in the order of the user."""

    records: tuple[RunRecord, ...]
    facts: tuple[RunFacts, ...]

    @property
    def names(self) -> list[str]:
        """A different name for each run: its job's name, or its location if another run has the same name."""
        count = Counter(record.name for record in self.records)
        names = [record.name if count[record.name] == 1 else redact(record.location) for record in self.records]
        return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)]

    @property
    def metric(self) -> str:
        """The metric that decides: the validation loss if each run has it, else the loss."""
        return VALIDATION if all(record.points(VALIDATION) for record in self.records) else "loss"

    @property
    def metric_name(self) -> str:
        return self.metric.replace("_", " ")

    @property
    def not_ranked(self) -> str:
        """The reasons why the runs are not ranked by their losses, as a sentence, or ""."""
        reasons = incomparable_keys([record.job for record in self.records], validation=self.metric == VALIDATION)
        if not reasons:
            return ""
        listed = "; ".join(f"{reason} ({', '.join(keys)})" for reason, keys in reasons)
        return f"The {self.metric_name} does not rank these runs: {listed}."

    @property
    def best(self) -> int | None:
        """The number of the run with the lowest metric, or None if no run has it or the runs are not ranked."""
        if self.not_ranked:
            return None
        found = [(value, at) for at, facts in enumerate(self.facts) if (value := self._value(facts)) is not None]
        return min(found)[1] if found else None

    def _value(self, facts: RunFacts) -> float | None:
        if self.metric == VALIDATION:
            return facts.best_validation[1] if facts.best_validation else None
        return facts.final_loss

    @property
    def rows(self) -> list[Row]:
        """The results of each run as text. Values that are not known are None. Columns without a value are omitted."""
        rows = [_row(name, facts) for name, facts in zip(self.names, self.facts, strict=True)]
        known = [head for head in rows[0] if any(row[head] is not None for row in rows)]
        return [{head: row[head] for head in known} for row in rows]

    @property
    def differences(self) -> list[tuple[str, list[str]]]:
        """(key, the value of each run) for the keys of the jobs that differ."""
        return differing_keys([record.job for record in self.records])


def compare_records(records: Sequence[RunRecord], now: float | None = None) -> Comparison:
    """Return the comparison of at least two runs.

    Raises:
      UserError: there are fewer than two runs.
    """
    if len(records) < 2:
        raise UserError(
            "E-REPORT-002",
            "a comparison needs two runs or more",
            why=f"{len(records)} run was given" if records else "no run was given",
            fix="name another run, such as forerun compare runs/A runs/B; for one run: forerun report runs/A",
        )
    return Comparison(tuple(records), tuple(run_facts(record, now) for record in records))


def comparison_page(comparison: Comparison) -> str:
    """Return the comparison as a complete HTML page."""
    names, best = comparison.names, comparison.best
    css = [COLOURS[number % len(COLOURS)] for number in range(len(names))]
    charts = [
        chart
        for key, title, kind, from_zero in METRICS
        if (chart := line_chart(title, _curves(comparison, key), kind=kind, from_zero=from_zero)) is not None
    ]
    return render(
        "run_comparison.html.jinja",
        page_title=f"Comparison of {len(names)} runs",
        title=f"{len(names)} runs",
        answer=answer(comparison),
        rows=comparison.rows,
        legend_entries=[(css[at], name, "best" if at == best else "") for at, name in enumerate(names)],
        losses=_loss_charts(comparison),
        charts=charts,
        differences=[{"key": key, **dict(zip(names, texts, strict=True))} for key, texts in comparison.differences],
        version=__version__,
    )


def answer(comparison: Comparison) -> str:
    """Return which run has the lowest loss, or why the runs are not ranked."""
    if comparison.not_ranked:
        return comparison.not_ranked
    if comparison.best is None:
        return "No run has recorded a loss."
    value = comparison._value(comparison.facts[comparison.best])
    which = "" if comparison.metric == VALIDATION else "final "
    return f"{comparison.names[comparison.best]} has the lowest {which}{comparison.metric_name}: {value:.4f}."


def _loss_charts(comparison: Comparison) -> list[LineChart]:
    found = []
    for key, title in ((VALIDATION, "Validation loss"), ("loss", "Loss")):
        firsts = [points[0][1] for record in comparison.records if (points := record.points(key))]
        top = 2 * max(firsts) if firsts and max(firsts) > 0 else None
        curves = _curves(comparison, key)
        found.append(line_chart(title, curves, top=top, log=False, tall=True))
    return [chart for chart in found if chart is not None]


def _curves(comparison: Comparison, key: str) -> list[Curve]:
    return [
        Curve(name, record.points(key), COLOURS[number % len(COLOURS)])
        for number, (name, record) in enumerate(zip(comparison.names, comparison.records, strict=True))
    ]


def _row(name: str, facts: RunFacts) -> Row:
    usd, best = facts.cost.usd(facts.wall_seconds), facts.best_validation
    return {
        "run": name,
        "status": str(facts.status),
        "steps": f"{facts.step:,}",
        "final loss": None if facts.final_loss is None else f"{facts.final_loss:.4f}",
        "best validation": None if best is None else f"{best[1]:.4f} at {best[0]:,}",
        "tokens/s": None if facts.tokens_per_second is None else f"{facts.tokens_per_second:,.0f}",
        "MFU": None if facts.mfu is None else f"{100 * facts.mfu:.1f} %",
        "peak memory": None if facts.memory_peak_bytes is None else str(Bytes(facts.memory_peak_bytes)),
        "wall time": None if facts.wall_seconds is None else str(Seconds(facts.wall_seconds)),
        "useful": None if facts.useful_share is None else f"{100 * facts.useful_share:.1f} %",
        "cost": None if usd is None else str(Usd(usd)),
    }


def incomparable_keys(jobs: Sequence[Job], *, validation: bool) -> list[tuple[str, list[str]]]:
    """Return (reason, the keys that differ) for each reason why the losses of the jobs cannot be ranked.

    Args:
      jobs: the jobs.
      validation: whether validation losses are compared, not losses of training. They depend on what is held out.
    """
    keys = [key for key, _ in differing_keys(jobs)]
    data = [_TEXT, _HELD_OUT if validation else _WEIGHTS]
    reasons = (
        ("the objectives differ", [_OBJECTIVE]),
        ("the tokenizers differ", [_TOKENS]),
        (f"the {'validation' if validation else 'training'} data differs", data),
    )
    matches = [
        (reason, [key for key in keys if any(pattern.fullmatch(key) for pattern in patterns)])
        for reason, patterns in reasons
    ]
    return [(reason, differing) for reason, differing in matches if differing]
