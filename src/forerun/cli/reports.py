"""`forerun report`, `compare`, `runs` and `watch`: show runs, and change nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.reporter import LineReporter
from forerun.verbs.option_types import File, Value, port_number

if TYPE_CHECKING:
    from forerun.verbs.reports import RunComparison, RunReport


@options_of("forerun.verbs.reports:report_run")
def report(*, html: File | None = None, **options: Any) -> int:
    """Print the report of a run.

    Args:
      html: also write the report as a page with charts
    """
    from forerun.verbs.reports import report_run

    return _show(report_run(**options), "report", html)


@options_of("forerun.verbs.reports:compare_runs")
def compare(locations: Annotated[Sequence[str], Value("LOCATION")], *, html: File | None = None) -> int:
    """Print the comparison of runs.

    Args:
      html: also write the comparison as a page with charts
    """
    from forerun.verbs.reports import compare_runs

    return _show(compare_runs(*locations), "comparison", html)


@options_of("forerun.verbs.reports:runs")
def runs(*, json: bool = False, **options: Any) -> int:
    """List the runs of a folder.

    Args:
      json: print the list as JSON
    """
    from forerun.verbs.reports import print_runs
    from forerun.verbs.reports import runs as list_runs

    entries = list_runs(**options)
    if json:
        from json import dumps

        print(dumps([asdict(entry) for entry in entries], indent=2))
    elif entries:
        print_runs(entries)
    else:
        print(f"{options.get('folder', 'runs')} has no runs")
    return 0


def _show(found: RunReport | RunComparison, name: str, file: File | None) -> int:
    """Print a report or a comparison, as wide as the terminal, and write its page if `file` is given."""
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    found.print(SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPED_COLUMNS))
    if file:
        found.save_html(file)
        print(f"\n{name}: {file}")
    return 0


def watch(
    location: str,
    *,
    once: bool = False,
    web: bool = False,
    port: Annotated[int, Value("N", port_number)] | None = None,
) -> int:
    """Follow a run in the terminal or in a browser. Nothing is changed.

    Args:
      location: folder of a run, such as runs/quickstart, or the address of its checkpoints in a bucket
      once: print one frame and end
      web: serve the report of the run on 127.0.0.1 until Ctrl-C
      port: with `web`: the port (default: a free one)
    """
    if port is not None and not web:
        raise UserError(
            "E-WATCH-002", "--port is for --web", why="no page is served", fix="add --web, or remove --port"
        )
    if once and web:
        raise UserError(
            "E-WATCH-003",
            "--once and --web exclude each other",
            why="--once prints one frame, and --web serves a page until Ctrl-C",
            fix="remove one of them; `forerun report` writes the page to a file",
        )
    from forerun.console import SafeConsole
    from forerun.watch.run_reader import open_reader
    from forerun.watch.terminal import show_lines, show_live, show_once, wait_for_start

    reader = open_reader(location)
    if once:
        show_once(reader, SafeConsole())
        return 0
    end = Event()
    with interrupt.cooperating(lambda seconds: end.set()):
        wait_for_start(reader, end, LineReporter(sys.stderr))
        if end.is_set():
            return INTERRUPTED
        if web:
            from forerun.watch.web_server import serve

            serve(reader, port or 0, end, LineReporter(sys.stdout))
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            show_live(reader, SafeConsole(), end)
        else:
            show_lines(reader, sys.stdout, end)
    return INTERRUPTED if end.is_set() else 0
