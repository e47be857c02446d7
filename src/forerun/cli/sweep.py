"""`forerun sweep`: train a job with all combinations of some values, and compare the results."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from forerun import interrupt
from forerun.exit_codes import INTERRUPTED, STOPPED
from forerun.reporter import LineReporter

if TYPE_CHECKING:
    from forerun.verbs.sweep.runner import SweepRunner


def run(args: argparse.Namespace) -> int:
    from forerun.console import SafeConsole
    from forerun.verbs.sweep.report import print_table, shown_path, write_report
    from forerun.verbs.sweep.run_sweep import prepare, require_success, train

    sweep = prepare(args.job, args.words, parallel=args.parallel)
    for line in (*sweep.description(), *sweep.changes):
        print(line, flush=True)
    if args.dry_run:
        for number, one in enumerate(sweep.runs, 1):
            state = "finished" if sweep.file.is_finished(one) else sweep.file.record(one).state
            print(f"{number:>4}  {one.label}  {state}")
        return 0
    stops = Stops()
    interrupt.set_report(lambda: "the runs save and end; the same command continues the sweep")
    before = signal.signal(signal.SIGTERM, lambda number, frame: stops.stop(signal.SIGTERM))
    try:
        with interrupt.cooperating(lambda seconds: stops.stop(signal.SIGINT)):
            results = train(
                sweep,
                LineReporter(sys.stdout),
                stop_on_failure=args.stop_on_failure,
                on_runner=stops.use,
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    print()
    print_table(SafeConsole(), results)
    page = write_report(sweep, results)[-1]
    print(f"\nreport: {shown_path(page)}")
    if stops.signal is not None:
        return INTERRUPTED if stops.signal == signal.SIGINT else STOPPED
    require_success(results, sweep.folder)
    return 0


class Stops:
    """Signals that end the sweep early. The runner exists only after the runs were checked."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._runner: SweepRunner | None = None

    def use(self, runner: SweepRunner) -> None:
        self._runner = runner

    def stop(self, number: int) -> None:
        """End all runs with this signal. They save a checkpoint first."""
        self.signal = number
        if self._runner is not None:
            self._runner.stop(number)
