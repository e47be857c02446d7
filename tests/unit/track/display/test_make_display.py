"""The display in a notebook. tests/e2e/test_notebooks.py runs it in a real kernel."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from forerun.console import SafeConsole, can_redraw
from forerun.notebook_kernel import in_notebook
from forerun.reporter import LineReporter, StepView
from forerun.track.display.make_display import NotebookDisplay, bar_html, make_display
from forerun.track.display.terminal import TerminalDisplay


def view(step: int) -> StepView:
    return StepView(step, 10, 2.5, 1000.0, None, 60.0, 0.0, 1e-3, 1.0)


class Kernel(types.ModuleType):
    """IPython with a shell of a given class, which records what it displays."""

    def __init__(self, shell: str) -> None:
        super().__init__("IPython")
        self.shown: list[str] = []
        self.get_ipython = lambda: type(shell, (), {})()
        self.display = types.SimpleNamespace(HTML=str, display=self._display)

    def _display(self, content: str, *, display_id: bool) -> Any:
        self.shown.append(content)
        return types.SimpleNamespace(update=self.shown.append)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel("ZMQInteractiveShell")
    monkeypatch.setitem(sys.modules, "IPython", made)
    monkeypatch.setitem(sys.modules, "IPython.display", made.display)  # type: ignore[arg-type]
    return made


def test_the_bar_is_updated_twice_a_second_and_at_the_end(kernel: Kernel) -> None:
    now, stream = 0.0, io.StringIO()
    with NotebookDisplay(stream, clock=lambda: now) as display:
        display.info("device: cpu")
        for step in range(1, 10):
            display.step(view(step))
            now += 0.2
    assert stream.getvalue() == "device: cpu\n"
    assert [text.split('value="')[1].split('"')[0] for text in kernel.shown] == ["1", "4", "7", "9"]


def test_a_running_phase_is_shown_in_place_and_leaves_one_line(kernel: Kernel) -> None:
    stream = io.StringIO()
    with NotebookDisplay(stream, clock=lambda: 0.0) as display:
        with display.phase("compile", "<x>"):
            assert stream.getvalue() == ""
        with display.phase("state"):
            pass
        display.step(view(1))
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["compile", "state"]
    phase, state, *bars = kernel.shown
    assert "compile ...  &lt;x&gt;" in phase
    assert "state ..." in state
    assert all('value="1"' in bar for bar in bars)


def test_without_a_step_the_status_is_empty_at_the_end(kernel: Kernel) -> None:
    with NotebookDisplay(io.StringIO(), clock=lambda: 0.0) as display, display.phase("data"):
        pass
    assert kernel.shown[-1] == ""


def test_the_bar_has_the_figures_of_the_step() -> None:
    assert 'max="10"' in bar_html(view(3))
    assert "eta 60.0 s" in bar_html(view(3))


def test_the_shell_of_colab_is_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("ZMQInteractiveShell")
    shell = type("Shell", (type(kernel.get_ipython()),), {})()
    kernel.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()


class Terminal(io.StringIO):
    """A stream that claims to be a terminal, as a shell command in a cell has it."""

    def isatty(self) -> bool:
        return True


def test_a_command_in_a_cell_has_no_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("TERM", "xterm-color")
    assert can_redraw(SafeConsole(file=Terminal()))
    assert isinstance(make_display(Terminal()), TerminalDisplay)
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # jupyter_client sets it for a kernel
    assert not can_redraw(SafeConsole(file=Terminal()))
    assert type(make_display(Terminal())) is LineReporter


def test_only_the_kernel_of_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    assert in_notebook()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(make_display(sys.stdout), NotebookDisplay)
    assert type(make_display(sys.stderr)) is LineReporter
    monkeypatch.setitem(sys.modules, "IPython", Kernel("TerminalInteractiveShell"))
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
