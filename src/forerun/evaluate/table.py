"""The result table of tasks, in the format of lm-eval.

The printer of lm-eval is not used, because it may fork a process, which is not safe with the threads of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADERS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")


def results_table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line per metric. The tasks of a group are below it, indented."""
    lines: list[tuple[str, ...]] = []
    for name, depth in _order(results):
        lines += _metric_lines(results, name, depth)
    widths = [max(len(line[n]) for line in (HEADERS, *lines)) for n in range(len(HEADERS))]
    rule = "|".join("-" * width for width in widths)
    shown = [
        "|".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (HEADERS, *lines)
    ]
    return "\n".join(f"|{line}|" for line in (shown[0], rule, *shown[1:]))


def _metric_lines(results: Mapping[str, Any], name: str, depth: int) -> list[tuple[str, ...]]:
    found = results["results"].get(name) or results.get("groups", {}).get(name, {})
    title = f"{' ' * depth}- {found.get('alias', name)}" if depth else str(found.get("alias", name))
    first = (title, str(results.get("versions", {}).get(name, "")))
    shots = str(results.get("n-shot", {}).get(name, ""))
    lines: list[tuple[str, ...]] = []
    for key, value in sorted(found.items()):
        metric, _, chosen = key.partition(",")
        if key in NOT_METRICS or metric.endswith("_stderr"):
            continue
        error = found.get(f"{metric}_stderr,{chosen}", "N/A")
        arrow = {True: "↑", False: "↓"}.get(results.get("higher_is_better", {}).get(name, {}).get(metric), "")
        lines.append((*first, chosen, shots, metric, arrow, _figure(value), "±", _figure(error)))
        first = ("", "")
    return lines or [(*first, "", shots, "", "", "", "", "")]


def _order(results: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the name and depth of each group and task, with each group before its members."""
    inside: Mapping[str, list[str]] = results.get("group_subtasks", {})
    known = {*results["results"], *results.get("groups", {})}
    order: list[tuple[str, int]] = []

    def add(name: str, depth: int) -> None:
        if name in known and name not in {seen for seen, _ in order}:
            order.append((name, depth))
            for child in inside.get(name, ()):
                add(child, depth + 1)

    inner = {child for children in inside.values() for child in children}
    for name in (*inside, *results["results"]):
        if name not in inner:
            add(name, 0)
    return order


def _figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
