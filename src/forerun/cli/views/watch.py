"""`forerun watch`: follow a run in the terminal or in a browser. Nothing is changed."""

from __future__ import annotations

import argparse
import os
import sys
from threading import Event

from forerun import interrupt
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.reporter import LineReporter


def run(args: argparse.Namespace) -> int:
    if args.port is not None and not args.web:
        raise UserError(
            "E-WATCH-002", "--port is for --web", why="no page is served", fix="add --web, or remove --port"
        )
    if args.once and args.web:
        raise UserError(
            "E-WATCH-003",
            "--once and --web exclude each other",
            why="--once prints one frame, and --web serves a page until Ctrl-C",
            fix="remove one of them; `forerun report` writes the page to a file",
        )
    from forerun.console import SafeConsole
    from forerun.watch.run_reader import open_reader
    from forerun.watch.terminal import show_lines, show_live, show_once, wait_for_start

    reader = open_reader(args.location)
    if args.once:
        show_once(reader, SafeConsole())
        return 0
    end = Event()
    with interrupt.cooperating(lambda seconds: end.set()):
        wait_for_start(reader, end, LineReporter(sys.stderr))
        if end.is_set():
            return INTERRUPTED
        if args.web:
            from forerun.watch.web.server import serve

            serve(reader, args.port or 0, end, LineReporter(sys.stdout))
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            show_live(reader, SafeConsole(), end)
        else:
            show_lines(reader, sys.stdout, end)
    return INTERRUPTED if end.is_set() else 0
