"""`forerun sweep`: train a job with all combinations of some values, and compare the results."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.exit_codes import INTERRUPTED, STOPPED
from forerun.reporter import LineReporter
from forerun.verbs.option_types import JobFile, Value

if TYPE_CHECKING:
    from forerun.verbs.sweep.runner import SweepRunner


@options_of("forerun.verbs.sweep.sweep:sweep")
def sweep(
    job: JobFile,
    *values: Annotated[str, Value("KEY=V1,V2")],
    dry_run: bool = False,
    **options: Any,
) -> int:
    """Train a job with all combinations of some values, and print the results.

    Args:
      dry_run: only list the runs
    """
    from forerun.console import SafeConsole
    from forerun.verbs.sweep.report import print_table, shown_path, write_report
    from forerun.verbs.sweep.run_sweep import prepare, require_success, train

    stop_on_failure = options.pop("stop_on_failure", False)
    prepared = prepare(job, values, **options)
    for line in (*prepared.description(), *prepared.changes):
        print(line, flush=True)
    if dry_run:
        for number, run in enumerate(prepared.runs, 1):
            state = "finished" if prepared.file.is_finished(run) else prepared.file.record(run).state
            print(f"{number:>4}  {run.label}  {state}")
        return 0
    stops = Stops()
    interrupt.set_report(lambda: "the runs save and end; the same command continues the sweep")
    before = signal.signal(signal.SIGTERM, lambda number, frame: stops.stop(signal.SIGTERM))
    try:
        with interrupt.cooperating(lambda seconds: stops.stop(signal.SIGINT)):
            results = train(
                prepared,
                LineReporter(sys.stdout),
                stop_on_failure=stop_on_failure,
                on_runner=stops.use,
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    print()
    print_table(SafeConsole(), results)
    page = write_report(prepared, results)[-1]
    print(f"\nreport: {shown_path(page)}")
    if stops.signal is not None:
        return INTERRUPTED if stops.signal == signal.SIGINT else STOPPED
    require_success(results, prepared.folder)
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
