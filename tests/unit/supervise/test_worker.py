"""The worker of a GPU node: one process with all GPUs of the node, also in a task of Slurm or MPI."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import pytest

from forerun.supervise.worker import silent_worker

JOIN = """
import sys
from dataclasses import replace
import jax
from jax._src import xla_bridge
from forerun.supervise.worker import silent_worker
replace(silent_worker(), hosts=2, index=int(sys.argv[1]), coordinator=sys.argv[2]).initialize_jax()
jax.config.update("jax_platforms", "cpu")
print(xla_bridge.CUDA_VISIBLE_DEVICES.value, len(jax.local_devices()), len(jax.devices()))
print(*(device.process_index for device in jax.devices()))
"""


def test_a_host_alone_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("it has one host"))
    silent_worker().initialize_jax()


def test_the_worker_asks_for_all_gpus_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **named: asked.update(named))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    replace(silent_worker(), hosts=2, index=1, coordinator="unix:socket").initialize_jax()
    assert asked.get("local_device_ids") is None
    assert asked["cluster_detection_method"] == "deactivate", "Slurm's variables would select one GPU per process"


@pytest.mark.timing
def test_slurm_does_not_reduce_the_devices_of_a_node(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.delenv("JAX_NUMPY_DTYPE_PROMOTION", raising=False)
    command = [sys.executable, "-P", "-W", "ignore", "-c", JOIN]
    workers = [
        subprocess.Popen([*command, str(index), f"unix:{tmp_path}/socket"], stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=120)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for lines in printed:
        assert lines[0].split() == ["all", "4", "8"]
        assert lines[1].split() == ["0"] * 4 + ["1"] * 4, "the devices of a node are consecutive"


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
