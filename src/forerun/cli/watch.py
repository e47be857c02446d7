"""`forerun watch`: follow a run in the terminal or in a browser. Nothing is changed."""

from __future__ import annotations

import os
import sys
from threading import Event
from typing import Annotated

from forerun import interrupt
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Value, port_number


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
