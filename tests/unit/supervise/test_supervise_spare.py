"""Beside a worker that makes steps waits the next one, with its imports done; it begins when the worker dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from forerun.supervise.worker import connect
notes, fault = Path(sys.argv[1]), sys.argv[2]
imported = []
def imports():
    imported.append(True)
    (notes / "spare.part").write_text(str(os.getpid()))
    (notes / "spare.part").replace(notes / "spare")
worker = connect(imports)
with (notes / "lives").open("a") as file:
    print(json.dumps([worker.attempt, os.getpid(), bool(imported)]), file=file)
for number in range(1, 11):
    worker.stop.go()
    worker.pulse.step(number)
    time.sleep(0.02)
if worker.attempt == 1:
    while not (notes / "spare").exists():
        time.sleep(0.01)
    if fault == "spare too":
        spare = (notes / "spare").read_text()
        os.kill(int(spare), signal.SIGKILL)
        while Path("/proc", spare).exists():  # until its supervisor has seen its end
            time.sleep(0.01)
        time.sleep(0.5)  # and has looked at it
    os.kill(os.getpid(), signal.SIGKILL)
"""
SUPERVISOR = """
import sys
from pathlib import Path
from forerun.supervise.host_address import given
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.supervisor import supervise
notes, fault = sys.argv[1:]
limits = Limits(stall_floor=600)  # a spare may take its time to come
command = [sys.executable, str(Path(notes, "worker.py")), notes, fault]
sys.exit(supervise(command, given(None, None), Path(notes, "run"), limits=limits, spare=True))
"""


def lives(folder: Path, fault: str) -> list[list[object]]:
    """[attempt, process, whether its imports were done before] of each worker."""
    (folder / "worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src")}
    words = [sys.executable, "-c", SUPERVISOR, str(folder), fault]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in (folder / "lives").read_text().splitlines()]


def test_the_spare_is_the_next_worker_and_a_new_one_ends_with_the_run(tmp_path: Path) -> None:
    first, second = lives(tmp_path, "none")
    assert (first[0], first[2]) == (1, False)
    assert (second[0], second[2]) == (2, True)
    newest = int((tmp_path / "spare").read_text())
    assert not Path(f"/proc/{newest}").exists()


def test_a_spare_that_died_is_not_waited_for(tmp_path: Path) -> None:
    first, second = lives(tmp_path, "spare too")
    assert (first[0], first[2]) == (1, False)
    assert (second[0], second[2]) == (2, False)
    assert second[1] != int((tmp_path / "spare").read_text())
