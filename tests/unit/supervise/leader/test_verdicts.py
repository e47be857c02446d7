"""When a worker counts as stuck, and who is to blame."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from forerun.supervise.child import WorkerProgress, frames_of
from forerun.supervise.leader.leader_view import Member
from forerun.supervise.leader.verdicts import blame, stalled
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Phase, Saved, Step, Unit, Waiting, WorkerUnits, WorkerView

JAX = "_value (/env/site-packages/jax/_src/array.py:600)"
USER = "read (/home/me/data.py:7)"


def host_with(view: WorkerView, frames: tuple[str, ...] = (), busy: float = 0.0) -> Member:
    return Member(0, "a", "vm-0", 100, 0.0, view=view, frames=frames, busy=busy)


def stepped(seconds: list[float], limits: Limits | None = None) -> WorkerProgress:
    progress, now = WorkerProgress(limits or Limits(), 0.0), 0.0
    for number, taken in enumerate([0.0, *seconds], 1):
        now += taken
        progress.hear(Step(number, number), now)
    return progress


def overdue(progress: WorkerProgress, now: float) -> bool:
    return progress.view(now, state="S", cpu_seconds=0, alive=True).overdue


def test_short_steps_are_waited_for_within_ten_seconds() -> None:
    progress = stepped([0.1] * 50)
    assert not overdue(progress, 5.0 + 8.4)
    assert overdue(progress, 5.0 + 8.6)


def test_the_time_that_the_watcher_stood_still_is_no_silence() -> None:
    progress = stepped([0.1] * 50)
    progress.excuse(20.0, 26.0)
    assert not overdue(progress, 26.0 + 7.3)
    assert overdue(progress, 26.0 + 7.6)
    progress.hear(Saved(1.0, 51), 40.0)
    progress.excuse(20.0, 41.0)
    assert not overdue(progress, 41.0 + 8.4), "what was heard since is not in the future"
    assert overdue(progress, 41.0 + 8.6)


def test_long_steps_are_waited_for_five_times_as_long() -> None:
    progress = stepped([20.0] * 50)
    assert progress.limit_seconds() == pytest.approx(0.85 * 5 * 20)


def test_the_slowest_of_a_hundred_counts() -> None:
    assert stepped([1.0] * 99 + [9.0, 9.0]).step_seconds() == 9.0
    assert stepped([1.0] * 200 + [9.0]).step_seconds() == 1.0


def test_the_first_step_after_a_phase_is_no_measure() -> None:
    assert stepped([30.0] + [0.1] * 50).step_seconds() == pytest.approx(0.1)


def test_first_steps_may_take_longer() -> None:
    assert stepped([0.1, 0.1]).limit_seconds() == Limits().phase_seconds("first steps") == 900


def test_a_phase_has_a_limit_of_its_own_and_its_time_is_no_step_time() -> None:
    progress = stepped([0.1] * 50)
    progress.hear(Phase("evaluate", 51), 5.0)
    assert progress.limit_seconds() == 3600
    progress.hear(Step(52, 52), 500.0)
    assert progress.limit_seconds() == pytest.approx(8.5)
    assert not overdue(progress, 508.0)


def test_a_wait_for_data_is_a_phase_until_the_next_unit() -> None:
    progress = stepped([0.1] * 50)
    progress.hear(Waiting("data", 51), 5.0)
    progress.hear(Waiting("data", 51), 5.0)
    assert (progress.phase, progress.limit_seconds()) == ("waiting for data", 2400)
    progress.hear(Saved(1.0, 51), 5.5)
    assert progress.phase == "waiting for data", "a save is committed in the background"
    progress.hear(Unit(52), 6.0)
    assert (progress.phase, progress.units) == ("step", 52)


def test_other_words_are_no_progress() -> None:
    progress = stepped([0.1] * 50)
    progress.hear(WorkerUnits(99), 13.0)
    assert overdue(progress, 14.0)
    assert progress.units == 51


def view(units: int = 9, phase: str = "step", silent: float = 12.0, limit: float = 8.5, state: str = "S") -> WorkerView:
    return WorkerView(phase=phase, step=8, units=units, silent_seconds=silent, limit_seconds=limit, state=state)


def test_a_host_in_a_phase_of_its_own_excuses_the_others() -> None:
    assert stalled({0: view(), 1: view()})
    assert not stalled({0: view(), 1: view(phase="waiting for data", limit=2400)})
    assert stalled({0: view(), 1: view(phase="waiting for data", silent=2401, limit=2400)})
    assert not stalled({0: view(silent=3), 1: view(silent=3)})
    assert not stalled({0: WorkerView(limit_seconds=math.inf)})


def test_a_process_that_a_signal_has_stopped_is_not_excused_by_a_long_phase() -> None:
    progress = WorkerProgress(Limits(), 0.0)
    progress.hear(Phase("compile", 0), 1.0)

    def seen(now: float, state: str) -> WorkerView:
        return progress.view(now, state=state, cpu_seconds=0, alive=True)

    assert not stalled({0: seen(100.0, "T"), 1: view(phase="compile", limit=7200)}), "it was seen only now"
    assert not seen(108.0, "T").overdue
    halted = seen(109.0, "T")
    assert halted.overdue
    assert stalled({0: halted, 1: view(phase="compile", limit=7200)})
    assert blame({0: host_with(halted), 1: host_with(view(phase="compile"))}).host == 0
    assert not seen(110.0, "R").overdue, "somebody has let it go on"
    assert not seen(120.0, "T").overdue


@pytest.mark.parametrize(
    ("hosts", "host", "words"),
    [
        ({0: host_with(view(), (JAX,)), 1: host_with(view(state="T"))}, 1, "is stopped"),
        ({0: host_with(view(), (JAX,)), 1: host_with(view(8), (JAX,))}, 1, "begun 8 units of work, others 9"),
        ({0: host_with(view(), (JAX,)), 1: host_with(view(), (USER,))}, 1, "in read (/home/me/data.py:7)"),
        ({0: host_with(view(9), (USER,)), 1: host_with(view(8), (JAX,))}, 1, "begun 8"),
        ({0: host_with(view(), (JAX, USER), 0.9), 1: host_with(view(), (JAX,), 0.02)}, 0, "called by read"),
        ({0: host_with(view(), (JAX,)), 1: host_with(view(phase="save", silent=4000, limit=3600))}, 1, "'save'"),
        ({0: host_with(view(), (JAX,)), 1: host_with(view())}, 1, "does not report its stack"),
        ({0: host_with(view(), (JAX,)), 1: host_with(view(), (JAX,))}, None, "network"),
        ({0: host_with(view(), (USER,))}, 0, "no progress for 12.0 s"),
    ],
)
def test_the_host_to_blame_is_the_one_that_the_others_wait_for(
    hosts: dict[int, Member], host: int | None, words: str
) -> None:
    found = blame(hosts)
    assert found.host == host
    assert words in found.why


DUMP = """
import faulthandler, sys, threading
inside, leave = threading.Event(), threading.Event()
def waits_elsewhere():
    inside.set()
    leave.wait()
def dumps():
    other = threading.Thread(target=waits_elsewhere)
    other.start()
    inside.wait()
    faulthandler.dump_traceback(sys.stdout, all_threads=True)
    leave.set()
    other.join()
    print(threading.main_thread().ident, other.ident)
dumps()
"""


def test_frames_of_the_main_thread_are_found_in_a_real_dump() -> None:
    """Of a process of its own: a dump has a hundred threads at most, the oldest last, and other tests have left some
    here."""
    text = subprocess.run([sys.executable, "-c", DUMP], capture_output=True, text=True, check=True).stdout
    mine, others = (frames_of(text, int(thread)) for thread in text.splitlines()[-1].split())
    assert mine[0].startswith("dumps (")
    assert any(frame.startswith("waits_elsewhere (") for frame in others)
    assert not any("waits_elsewhere" in frame for frame in mine)
