"""The environment of each process of a sweep. No TPU and no GPU is attached: only the variables are tested."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.verbs.sweep.runner import HostDevices, device_shares, host_devices


def job(device: str = "auto") -> Job:
    return Job.model_validate(
        {"name": "x", "model": {"layers": 1, "embed": 16, "heads": 2}, "data": "t", "device": device}
    )


def test_a_single_process_keeps_its_environment() -> None:
    [share] = device_shares(HostDevices("tpu", (0, 1, 2, 3)), 1)
    assert (dict(share.environment), share.cores) == ({}, None)


def test_chips_of_a_tpu_are_disjoint_boxes_with_their_own_ports() -> None:
    first, second = device_shares(HostDevices("tpu", (0, 1, 2, 3)), 2)
    assert first.environment == {
        "TPU_VISIBLE_CHIPS": "0,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": "localhost:8476",
        "TPU_PROCESS_PORT": "8476",
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    assert second.environment["TPU_VISIBLE_CHIPS"] == "2,3"
    assert second.environment["TPU_PROCESS_ADDRESSES"] == "localhost:8477"


@pytest.mark.parametrize(
    ("chips", "parallel", "visible", "bounds"),
    [(8, 8, "7", "1,1,1"), (8, 2, "4,5,6,7", "2,2,1"), (8, 3, "4,5", "1,2,1"), (4, 4, "3", "1,1,1")],
)
def test_the_last_share_of_a_tpu(chips: int, parallel: int, visible: str, bounds: str) -> None:
    last = device_shares(HostDevices("tpu", tuple(range(chips))), parallel)[-1]
    assert last.environment["TPU_VISIBLE_CHIPS"] == visible
    assert last.environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == bounds


def test_gpus_are_divided_by_cuda() -> None:
    shares = device_shares(HostDevices("gpu", (0, 2, 3, 5)), 2)
    assert [share.environment for share in shares] == [
        {"CUDA_VISIBLE_DEVICES": "0,2"},
        {"CUDA_VISIBLE_DEVICES": "3,5"},
    ]


def test_cores_are_divided_and_the_environment_stays() -> None:
    shares = device_shares(HostDevices("cpu", (0, 1, 2, 3, 4)), 2)
    assert [(dict(share.environment), share.cores) for share in shares] == [({}, (0, 1)), ({}, (2, 3))]


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_more_processes_than_devices_is_an_error(platform: str) -> None:
    with pytest.raises(UserError) as caught:
        device_shares(HostDevices(platform, (0, 1)), 3)
    assert_error(caught.value, "E-COMMAND-062", fix="--parallel 2")


def test_the_devices_of_this_host_are_cores() -> None:
    assert host_devices(job()) == HostDevices("cpu", tuple(sorted(os.sched_getaffinity(0))))


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        (("accel0", "accel1"), {}, (0, 1)),
        (("vfio/0", "vfio/1", "vfio/2", "vfio/vfio"), {"TPU_ACCELERATOR_TYPE": "v6e-4"}, (0, 1, 2)),
        (("accel0", "accel1", "accel2"), {"TPU_VISIBLE_CHIPS": "1,2"}, (1, 2)),
    ],
)
def test_chips_are_counted_without_opening_them(
    tmp_path: Path, files: tuple[str, ...], environment: dict[str, str], expected: tuple[int, ...]
) -> None:
    pytest.importorskip("libtpu")
    for name in files:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert host_devices(job("tpu"), tmp_path, environment) == HostDevices("tpu", expected)
