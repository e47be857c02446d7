"""Recordings of TPUs and GPUs, written as the real protobuf with known times, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from forerun.run.device_profile import DeviceProfile, device_profiles, summary_of

Timed = Sequence[tuple[str, int, int]]  # (name, start and end in microseconds)


def plane(name: str, lines: Mapping[str, Timed]) -> str:
    names = sorted({event[0] for events in lines.values() for event in events})
    text = f'planes {{ name: "{name}"\n'
    for number, event in enumerate(names, 1):
        text += f'  event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }}\n'
    for number, (line, events) in enumerate(lines.items(), 1):
        text += f'  lines {{ id: {number} name: "{line}" timestamp_ns: 1000\n'
        for event, start, end in events:
            times = f"offset_ps: {start * 10**6} duration_ps: {(end - start) * 10**6}"
            text += f"    events {{ metadata_id: {names.index(event) + 1} {times} }}\n"
        text += "  }\n"
    return text + "}\n"


def profiles_of(folder: Path, *planes: str) -> list[DeviceProfile]:
    file = folder / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace("".join(planes)))
    return device_profiles(file)


# Two steps of 100 us: a loop with a matmul and a collective, a pause of 10 us, and a copy.
def tpu_operations(at: int) -> Timed:
    return [
        ("%while.5 = (s32[], bf16[8]) while(%t)", at, at + 60),
        ("%fusion.3 = bf16[8,8] fusion(%a), kind=kOutput", at, at + 40),
        ("%all-reduce.1 = bf16[8] all-reduce(%b)", at + 40, at + 55),
        ("%copy.9 = bf16[8] copy(%c)", at + 70, at + 100),
    ]


TPU = plane(
    "/device:TPU:0",
    {
        "Steps": [("1", 0, 100), ("2", 100, 200)],
        "XLA Modules": [("jit_step(1)", 0, 100), ("jit_step(1)", 100, 200)],
        "XLA Ops": [*tpu_operations(0), *tpu_operations(100)],
        "Async XLA Ops": [("%copy-start.2 = bf16[8] copy-start(%d)", 10, 30)],
    },
)
HOST = plane("/host:CPU", {"python": [("train", 0, 5)]})


def test_tpu(tmp_path: Path) -> None:
    summary = summary_of(profiles_of(tmp_path, HOST, TPU), steps=2)
    assert summary.devices == ("/device:TPU:0",)
    assert summary.step_seconds == pytest.approx(100e-6)
    assert summary.busy_seconds == pytest.approx(90e-6)
    assert summary.idle_seconds == pytest.approx(10e-6)
    assert summary.kind_seconds == pytest.approx({"compute": 40e-6, "collective": 15e-6, "copy": 30e-6})
    assert summary.hidden_seconds == pytest.approx(10e-6)
    assert [(one.name, one.calls) for one in summary.operations] == [
        ("fusion.3", 1),
        ("copy.9", 1),
        ("all-reduce.1", 1),
    ]
    assert [one.seconds for one in summary.operations] == pytest.approx([40e-6, 30e-6, 15e-6])


def test_steps_reported_by_the_device(tmp_path: Path) -> None:
    [profile] = profiles_of(tmp_path, TPU)
    assert profile.steps_ns == (100_000, 100_000)


def test_time_inside_an_operation_counts_once(tmp_path: Path) -> None:
    """The loop itself has the 5 us that no operation inside it covers."""
    [profile] = profiles_of(tmp_path, TPU)
    loops = [one for one in profile.operations if one.name == "while.5"]
    assert [one.self_ns for one in loops] == pytest.approx([5000, 5000])
    assert sum(one.self_ns for one in profile.operations) == pytest.approx(profile.busy_ns)


def test_gpu_streams_overlap(tmp_path: Path) -> None:
    """A collective on a second stream runs beside the matmul, so the device is busy for 50 of 60 us."""
    streams = {
        "Stream #13(Compute)": [("gemm_fusion_dot_2", 0, 40), ("MemcpyH2D", 50, 60)],
        "Stream #14(Collectives)": [("ncclDevKernel_AllReduce", 10, 40)],
    }
    profiles = profiles_of(tmp_path, plane("/device:GPU:0", streams), plane("/device:GPU:1", streams))
    summary = summary_of(profiles, steps=1)
    assert summary.devices == ("/device:GPU:0", "/device:GPU:1")
    assert summary.step_seconds == pytest.approx(60e-6)
    assert summary.idle_seconds == pytest.approx(10e-6)
    assert summary.kind_seconds == pytest.approx({"compute": 40e-6, "collective": 30e-6, "host transfer": 10e-6})


def test_a_plane_without_operations_is_no_device(tmp_path: Path) -> None:
    assert profiles_of(tmp_path, HOST, plane("/device:TPU:1", {"XLA Modules": []})) == []


def test_text_has_the_figures(tmp_path: Path) -> None:
    text = summary_of(profiles_of(tmp_path, TPU), steps=2).text("title")
    for figure in ("0.1 ms", "90.0%", "10.0%", "15.0%", "fusion.3", "all-reduce.1", "copy.9"):
        assert figure in text
    assert "while" not in text
