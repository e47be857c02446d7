"""When the work on a run began: imports count, and the wait of a spare or an earlier run of the process does not."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

from forerun.supervise.worker import silent_worker

TICK_SECONDS = 0.02  # the system knows the start of a process in hundredths of a second
PROGRAM = """
import time
time.sleep(0.3)
from forerun.supervise.worker import process_start_seconds
print(process_start_seconds())
"""


def test_the_start_of_a_process_is_before_its_imports() -> None:
    before = time.time()
    child = subprocess.Popen([sys.executable, "-P", "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    begun = time.time()
    printed, _ = child.communicate(timeout=300)
    assert before - TICK_SECONDS < float(printed) < begun + TICK_SECONDS


def test_only_the_first_run_of_a_process_begins_with_it() -> None:
    worker = replace(silent_worker(), _starts=[5.0])
    assert worker.take_start_seconds() == 5.0
    now = time.time()
    assert worker.take_start_seconds() >= now
