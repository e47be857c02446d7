"""Names of compiler options that a job may set."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: texts\n")


@pytest.mark.parametrize("name", ["--xla_tpu_scoped_vmem_limit_kib", "XLA_TPU_X", "tpu_scoped", "xla_", "xla tpu", "x"])
def test_a_name_that_is_no_compiler_flag_is_refused(name: str) -> None:
    with raises_error("E-JOB-153") as caught:
        load("job.yaml", [f"compiler_options={{'{name}': true}}"])
    assert name in caught.value.what


@pytest.mark.parametrize(
    "name",
    [
        "xla_dump_to",
        "xla_jf_dump_to",
        "xla_gpu_cuda_data_dir",
        "xla_gpu_asm_extra_flags",
        "xla_allow_excess_precision",
        "xla_cpu_enable_fast_math",
        "xla_tpu_bf16_emission_mode",
        "xla_disable_hlo_passes",
    ],
)
def test_an_option_that_is_not_about_speed_is_refused(name: str) -> None:
    with raises_error("E-JOB-154") as caught:
        load("job.yaml", [f"compiler_options.{name}=x"])
    assert f"compiler_options.{name}" in caught.value.what
    assert caught.value.why == f"command line sets compiler_options.{name}"


def test_values_keep_their_types_in_files_and_in_json() -> None:
    Path("job.yaml").write_text(
        "model: qwen3-0.6b\ndata: texts\ncompiler_options:\n  xla_tpu_a: true\n  xla_tpu_b: 98304\n"
        "  xla_tpu_c: 0.5\n  xla_tpu_d: ENABLED\n  xla_tpu_e: null\n"
    )
    job = load("job.yaml", ["compiler_options.xla_tpu_f=2"]).job
    expected = [True, 98304, 0.5, "ENABLED", None, 2]
    for one in (job, Job.model_validate_json(job.model_dump_json())):
        values = list(one.compiler_options.values())
        assert [(type(value), value) for value in values] == [(type(value), value) for value in expected]


def test_a_list_is_not_a_value() -> None:
    with pytest.raises(UserError) as caught:
        load("job.yaml", ["compiler_options.xla_tpu_a=[1]"])
    assert "compiler_options" in caught.value.why
