"""Compiler options by device, layout and job."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest

from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.program.compiler_options import FROM_JOB, compile_lowered, compiler_options

KINDS = ("TPU v2", "TPU v3", "TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
MESHES = (MeshShape(1, 1, 1), MeshShape(1, 8, 1), MeshShape(8, 1, 1), MeshShape(1, 4, 2), MeshShape(2, 2, 2))
VMEM = "xla_tpu_scoped_vmem_limit_kib"
UNSAFE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


def test_a_platform_without_a_table_has_no_options() -> None:
    assert compiler_options("cpu", "cpu", MESHES[1]).values == {}
    assert compiler_options("tpu", "TPU of tomorrow", MESHES[1]).values == {}
    assert compiler_options("gpu", "TPU v6 lite", MESHES[1]) == compiler_options("cuda", "NVIDIA L4", MESHES[3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_option_has_a_reason_and_a_text_as_value(kind: str, mesh: MeshShape) -> None:
    options = compiler_options("tpu", kind, mesh)
    assert options.values.keys() == options.reasons.keys()
    assert all(isinstance(value, str) for value in options.values.values())
    assert all(len(reason) > 10 for reason in options.reasons.values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "TPU v5 lite"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_fusion_that_the_newest_compiler_rejects_is_only_for_v5e(kind: str, mesh: MeshShape) -> None:
    assert UNSAFE not in compiler_options("tpu", kind, mesh).values
    with pytest.raises(UserError) as caught:
        compiler_options("tpu", kind, mesh, {UNSAFE: True})
    assert (caught.value.code, kind in caught.value.what) == ("E-JOB-155", True)
    assert compiler_options("tpu", kind, mesh, {UNSAFE: False}).values[UNSAFE] == "false"
    assert compiler_options("tpu", "TPU v5 lite", mesh, {UNSAFE: True}).values[UNSAFE] == "true"


def test_options_of_the_job_replace_extend_and_remove() -> None:
    table = compiler_options("tpu", "TPU v6 lite", MESHES[1])
    first = next(name for name in table.values if name != VMEM)
    own = compiler_options("tpu", "TPU v6 lite", MESHES[1], {VMEM: 65536, first: None, "xla_tpu_more": True})
    assert own.values == {name: value for name, value in table.values.items() if name not in (first, VMEM)} | {
        VMEM: "65536",
        "xla_tpu_more": "true",
    }
    assert {name for name, reason in own.reasons.items() if reason == FROM_JOB} == {VMEM, "xla_tpu_more"}


@pytest.mark.parametrize(
    ("platform", "used"),
    [
        ("tpu", {"xla_tpu_a", "xla_sc_b", "xla_latency_x"}),
        ("gpu", {"xla_gpu_c", "xla_latency_x"}),
        ("cuda", {"xla_gpu_c", "xla_latency_x"}),
        ("cpu", {"xla_cpu_d"}),
    ],
)
def test_options_of_another_platform_are_ignored(platform: str, used: set[str]) -> None:
    names = ("xla_tpu_a", "xla_sc_b", "xla_gpu_c", "xla_cpu_d", "xla_latency_x")
    found = compiler_options(platform, "a device", MESHES[1], dict.fromkeys(names, 1))
    assert {name for name, reason in found.reasons.items() if reason == FROM_JOB} == used
    assert found.values[min(used)] == ("1" if platform == "tpu" else 1)


def test_options_are_grouped_by_their_reason() -> None:
    found = compiler_options("gpu", "a GPU", MESHES[1], {"xla_gpu_c": True, "xla_gpu_d": 2})
    assert found.by_reason()[FROM_JOB] == ["xla_gpu_c=true", "xla_gpu_d=2"]
    assert sum(map(len, found.by_reason().values())) == len(found.values)


def _lowered() -> Any:
    return jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((2,), "float32")).lower()


def test_an_option_that_the_compiler_does_not_know() -> None:
    with pytest.raises(UserError, match="xla_cpu_of_tomorrow") as caught:
        compile_lowered(_lowered(), {"xla_cpu_of_tomorrow": True})
    assert caught.value.code == "E-COMMAND-097"
    assert "compile option" in caught.value.why


def test_other_errors_of_the_compiler_are_not_about_options() -> None:
    class Broken:
        def compile(self, compiler_options: Any) -> Any:
            raise RuntimeError("INTERNAL: something else")

    with pytest.raises(RuntimeError, match="something else"):
        compile_lowered(Broken(), {})


def test_options_that_the_compiler_knows() -> None:
    assert compile_lowered(_lowered(), {"xla_llvm_disable_expensive_passes": True})(jax.numpy.zeros(2)).tolist() == [
        1,
        1,
    ]
    assert compile_lowered(_lowered(), {})(jax.numpy.zeros(2)).tolist() == [1, 1]


def test_the_table_is_read_without_jax() -> None:
    code = "import sys, forerun.program.compiler_options; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
