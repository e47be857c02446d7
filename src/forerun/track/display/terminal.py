"""The live display on a terminal: running phases with their time, a progress bar, metrics, and a chart of the loss.

`step` only stores the metrics. A thread of rich draws them four times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Group, RenderableType
from rich.spinner import Spinner
from rich.text import Text

from forerun.console import SafeConsole, SafeLive
from forerun.reporter import Phase, Reporter, StepView
from forerun.safe_text import redact
from forerun.track.display.sparkline import Sparkline
from forerun.units import Seconds

DRAWINGS_PER_SECOND = 4
SPARKLINE_WIDTH = 16
BAR_WIDTH = 40


class TerminalDisplay(Reporter):
    """A display that redraws its lines on a terminal."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float]) -> None:
        self._console = SafeConsole(file=stream)
        self._clock = clock
        self._phases: list[Phase] = []
        self._view: StepView | None = None
        self._losses = Sparkline(SPARKLINE_WIDTH)
        self._spinner = Spinner("dots", style="cyan")
        self._live: SafeLive | None = None

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        phase = Phase(name, detail, self._clock)
        self._phases.append(phase)
        self._start()
        try:
            yield phase
        except BaseException:
            self._phases.remove(phase)
            self._print(Text(f"✗ {phase.closing(failed=True)}", style="red"))
            raise
        self._phases.remove(phase)
        self._print(Text.assemble(("✓ ", "green"), phase.closing(failed=False)))

    def step(self, view: StepView) -> None:
        self._view = view
        if view.loss is not None:
            self._losses.add(view.loss)
        self._start()

    def info(self, text: str) -> None:
        self._print(Text(redact(text)))

    def warn(self, text: str) -> None:
        self._print(Text(f"warning: {redact(text)}", style="yellow"))

    def close(self) -> None:
        """Draw the last metrics and restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> None:
        if self._live is None:
            self._live = SafeLive(
                console=self._console, get_renderable=self._drawn, refresh_per_second=DRAWINGS_PER_SECOND
            )
            self._live.start()

    def _print(self, text: Text) -> None:
        if self._live is not None:
            self._live.refresh()  # removes a phase that has just ended, before its closing line is printed
        self._console.print(text)

    def _drawn(self) -> RenderableType:
        """Return the lines to draw now."""
        width = self._console.width
        lines = [self._phase_line(phase) for phase in tuple(self._phases)]
        if self._view is not None:
            lines += [self._bar_line(self._view, width), self._figures_line(self._view, width)]
        return Group(*lines)

    def _phase_line(self, phase: Phase) -> Text:
        spin = self._spinner.render(self._console.get_time())
        assert isinstance(spin, Text)
        before = "" if phase.expected_seconds is None else f" ({Seconds(phase.expected_seconds)} last time)"
        name = f" {phase.name} {phase.elapsed_seconds}{before}"
        line = Text.assemble(spin, name, (redact(f"  {phase.detail}".rstrip()), "dim"))
        return _one_line(line, self._console.width)

    def _bar_line(self, view: StepView, width: int) -> Text:
        share = min(1.0, view.step / view.steps)
        before = f"step {view.step:>{len(str(view.steps))}}/{view.steps} {share:4.0%} "
        after = f" {view.eta()}"
        bar_width = max(0, min(BAR_WIDTH, width - len(before) - len(after)))
        done = int(share * bar_width)
        bar = (("━" * done, "green"), ("─" * (bar_width - done), "grey37"))
        return _one_line(Text.assemble((before, "bold"), *bar, after), width)

    def _figures_line(self, view: StepView, width: int) -> Text:
        """Return the loss, its chart, and as many other metrics as fit into the width."""
        loss, *rest = view.figures()
        line = Text.assemble((loss, "bold"), " ", (f"{self._losses!s:{SPARKLINE_WIDTH}}", "cyan"))
        for figure in rest:
            if line.cell_len + 2 + len(figure) > width:
                break
            line.append(f"  {figure}")
        return _one_line(line, width)


def _one_line(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
