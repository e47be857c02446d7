"""`forerun check`: print every value of a job, where it came from, and what follows from it."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from typing import TYPE_CHECKING

from forerun.safe_text import clean, printable, raw_stream
from forerun.verbs.check.values import Group, Row

if TYPE_CHECKING:
    from forerun.verbs.check.check import JobReport

_WIDEST_VALUE = 20
_NARROWEST_ORIGIN = 24
_BOLD, _DIM, _CYAN, _PLAIN = "\033[1m", "\033[2m", "\033[36m", "\033[0m"


def run(args: argparse.Namespace) -> int:
    """Print the values of a job. If nothing can be derived from them, print them and then the reason."""
    from forerun.cli.options.stage_choice import chosen_stages

    stages = chosen_stages(args)
    for stage in stages:
        from forerun.verbs.stages.stages import check_stage

        print(f"{'' if stage is stages[0] else chr(10)}stage {stage.name}: {stage.start_text}\n")
        _report(check_stage(stage, args.on), complete=args.all)
    if not stages:
        from forerun.verbs.check.check import check_loaded
        from forerun.verbs.job_files import open_job

        _report(check_loaded(open_job(args.job, args.overrides), args.on), complete=args.all)
    return 0


def _report(report: JobReport, complete: bool) -> None:
    _show(list(report.groups), complete=complete)
    if report.error is not None:
        sys.stdout.flush()
        raise report.error


def without_defaults(groups: list[Group]) -> tuple[list[Group], int]:
    """Return the rows that the user set or that are derived, and the number of omitted rows."""
    kept = [Group(title, [row for row in rows if _is_shown(row)]) for title, rows in groups]
    shown = sum(len(group.rows) for group in kept)
    return [group for group in kept if group.rows], sum(len(group.rows) for group in groups) - shown


def _is_shown(row: Row) -> bool:
    return row.kind != "default" or row.origin.startswith("derived:")


def table(groups: list[Group], width: int | None, colour: bool) -> str:
    """Return titled groups of aligned rows. If a value is too wide for its column, its origin is on the next line."""
    groups = [Group(printable(group.title), [_printable(row) for row in group.rows]) for group in groups]
    rows = [row for group in groups for row in group.rows]
    names = max(len(row.name) for row in rows)
    values = max((len(row.value) for row in rows if len(row.value) <= _WIDEST_VALUE), default=1)
    indent = " " * (2 + names + 2 + values + 2)
    room = max(_NARROWEST_ORIGIN, width - len(indent)) if width else sys.maxsize

    def painted(text: str, code: str) -> str:
        return f"{code}{text}{_PLAIN}" if colour and code else text

    def lines(row: Row) -> list[str]:
        first, *more = textwrap.wrap(row.origin, room, break_long_words=False) if width else [row.origin]
        left, right = {"default": (_DIM, _DIM), "override": ("", _CYAN)}.get(row.kind, ("", _DIM))
        head = f"  {row.name:<{names}}  {row.value:<{values}}  "
        start = [painted(head, left) + painted(first, right)]
        if len(head) > len(indent):
            start = [painted(head.rstrip(), left), indent + painted(first, right)]
        return start + [indent + painted(text, right) for text in more]

    return "\n\n".join(
        "\n".join([painted(group.title, _BOLD), *(line for row in group.rows for line in lines(row))])
        for group in groups
    )


def _printable(row: Row) -> Row:
    return row._replace(name=clean(row.name), value=clean(row.value), origin=clean(row.origin))


def _show(groups: list[Group], complete: bool) -> None:
    hidden = 0
    if not complete:
        groups, hidden = without_defaults(groups)
    terminal = sys.stdout.isatty()
    width = min(120, os.get_terminal_size(sys.stdout.fileno()).columns) if terminal else None
    text = table(groups, width, colour=terminal and not os.environ.get("NO_COLOR"))
    print(text, file=raw_stream(sys.stdout))  # the table filters its cells
    if hidden:
        print(f"\n{hidden} more values have their defaults: --all shows them with their reasons")
