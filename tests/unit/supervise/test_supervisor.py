"""A process that trains without a supervisor still stops between two steps when it is told to."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.errors import UserError
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.messages import StartWorker
from forerun.supervise.supervisor import attempt_variables, slice_variables

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


@pytest.mark.timing
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


@pytest.mark.timing
def test_the_spare_is_the_next_worker_and_a_new_one_ends_with_the_run(tmp_path: Path) -> None:
    first, second = lives(tmp_path, "none")
    assert (first[0], first[2]) == (1, False)
    assert (second[0], second[2]) == (2, True)
    newest = int((tmp_path / "spare").read_text())
    assert not Path(f"/proc/{newest}").exists()


@pytest.mark.timing
def test_a_spare_that_died_is_not_waited_for(tmp_path: Path) -> None:
    first, second = lives(tmp_path, "spare too")
    assert (first[0], first[2]) == (1, False)
    assert (second[0], second[2]) == (2, False)
    assert second[1] != int((tmp_path / "spare").read_text())


def test_hosts_and_workers_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("supervisor")
    console.info("lost host 1 (\x1b]0;owned\x07) at http://me:SECRET@host")
    worker = "é \x1b[2J \u202e http://host/?token=SECRET\n".encode() + b"\xff\n"
    for byte in worker[:4], worker[4:]:
        console.write(byte)
    console.close()
    shown = capsys.readouterr().err
    assert shown == (
        "supervisor: lost host 1 (\\x1b]0;owned\\x07) at http://***@host\né \\x1b[2J \\u202e http://host/?***\n\\xff\n"
    )


def variables(index: int, count: int, slices: int | None, **environment: str) -> dict[str, str]:
    return slice_variables(Hosts(index, count, "10.0.0.1", 9000 if count > 1 else 0), slices, environment)


def test_hosts_of_a_slice_are_consecutive() -> None:
    found = [variables(index, 8, 2) for index in range(8)]
    assert [int(one["MEGASCALE_SLICE_ID"]) for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {one["MEGASCALE_NUM_SLICES"] for one in found} == {"2"}
    assert {one["MEGASCALE_COORDINATOR_ADDRESS"] for one in found} == {"10.0.0.1"}


def test_jax_reads_these_names() -> None:
    from jax._src.clusters import cloud_tpu_cluster

    source = inspect.getsource(cloud_tpu_cluster)
    assert all(f"get_tpu_env_value('{name}')" in source for name in variables(0, 8, 2))


@pytest.mark.parametrize(("count", "slices"), [(8, None), (8, 1), (1, 2)])
def test_other_runs_need_none(count: int, slices: int | None) -> None:
    assert variables(0, count, slices) == {}


def test_variables_of_the_cloud_are_kept() -> None:
    assert variables(0, 8, 2, MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="1") == {}


@pytest.mark.parametrize(("count", "environment"), [(3, {}), (8, {"MEGASCALE_NUM_SLICES": "4"})])
def test_hosts_that_do_not_divide(count: int, environment: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        variables(0, count, 2, **environment)
    assert_error(caught.value, "E-HOSTS-034")


def test_the_remaining_slices_are_numbered_anew() -> None:
    """The second of three slices is lost. Host 4 is the first one of the third slice, and has the rank 2."""
    order = StartWorker(7, 2, 4, 2)
    cloud = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.9"}
    for environment, address in (({}, "10.0.0.1"), (cloud, "10.0.0.9")):
        found = attempt_variables(Hosts(4, 6, "10.0.0.1", 9000), 3, environment, order)
        assert found == {**cloud, "MEGASCALE_COORDINATOR_ADDRESS": address} | {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
        }


def test_one_remaining_slice_needs_no_variables() -> None:
    found = attempt_variables(Hosts(0, 4, "10.0.0.1", 9000), 2, {}, StartWorker(7, 0, 2, 1))
    assert set(found.values()) == {""}, "empty ones are removed"
