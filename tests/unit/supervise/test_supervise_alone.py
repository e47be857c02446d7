"""A process that trains without a supervisor still stops between two steps when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing

PROGRAM = """
import sys, time
from forerun.exit_codes import STOPPED
from forerun.supervise.worker import Stopped, alone, connect
assert connect() is None
worker = alone(grace_seconds=3000)
phase = sys.argv[1]
worker.initialize_jax()
if phase == "compile":
    print("ready", flush=True)
    time.sleep(600)
number = 0
try:
    while worker.stop.go():
        time.sleep(0.01)
        number += 1
        worker.pulse.step(number)
        if number == 5:
            worker.pulse.saved(0.01)
            print("ready", flush=True)
        if phase == "data" and number == 5:
            with worker.pulse.waiting("data"):
                time.sleep(600)
except Stopped:
    pass
print(number, worker.stop.units, worker.stop.save, 2000 < worker.stop.remaining_seconds() <= 3000)
sys.exit(STOPPED)
"""


@pytest.mark.parametrize("phase", ["compile", "step", "data"])
def test_sigterm(phase: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src")}
    words = [sys.executable, "-c", PROGRAM, phase]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        last = child.stdout.read().split()
        assert child.wait(60) == 75
    if phase == "compile":
        assert last == []
    else:
        done, begun, save, time_left = last
        assert done == begun
        assert int(done) >= 5
        assert (save, time_left) == ("True", "True")
