"""What `precision.matmul` is combined with, and where it runs."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import chip_named, chips, device_kind_of, require_matmul
from forerun.methods.method import method_of
from forerun.methods.requirements import eight_bit_note, eight_bit_weights
from forerun.nn.spec import Normal, ParamSpec, initial
from forerun.nn.weights.dense import Dense
from forerun.nn.weights.eight_bit import EightBit
from forerun.objectives.base import WithCompanion
from forerun.resolve.resolved_job import ResolvedJob

MODEL: dict[str, Any] = {"layers": 2, "embed": 16, "heads": 2, "vocab": 32}
SPECS = {
    "layers": {"up": Dense(ParamSpec((2, 16, 32), "LEF", Normal(0.02))), "gate": ParamSpec((2, 16), "LE", Normal(1))}
}


def job(**fields: Any) -> Job:
    given: dict[str, Any] = {"model": MODEL, "data": "unread", "steps": 1, "precision": {"matmul": "int8"}}
    return Job.model_validate(given | fields)


@pytest.mark.parametrize(
    ("fields", "code", "value"),
    [
        ({"qat": {"weights": "int4"}}, "E-METHOD-120", "qat"),
        ({"lora": {"base": "nf4"}}, "E-METHOD-121", "lora.base=nf4"),
        ({"preferences": {"loss": "dpo"}, "lora": {}}, "E-METHOD-122", "preferences"),
        ({"model": {"name": "qwen3-30b-a3b"}}, "E-METHOD-123", "experts"),
    ],
)
def test_combinations_that_are_rejected(fields: dict[str, Any], code: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        method_of(ResolvedJob(job(**fields)), 16)
    assert_error(caught.value, code, what=value, fix="matmul" if code != "E-METHOD-120" else "qat")
    method_of(ResolvedJob(job(**fields, precision={})), 16)


def test_combinations_that_work() -> None:
    for fields in ({}, {"lora": {"rank": 4}}, {"precision": {"matmul": "fp8"}}):
        method_of(ResolvedJob(job(**fields)), 16)


def test_chips_multiply_one_format() -> None:
    assert {chip.name: chip.eight_bits for chip in chips() if chip.is_tpu} == {
        **dict.fromkeys(("v2", "v3", "v4")),
        **dict.fromkeys(("v5e", "v5p", "v6e"), "int8"),
        "tpu7x": "fp8",
    }
    assert {chip.name for chip in chips() if not chip.is_tpu and chip.eight_bits is None} == {
        "A100-40",
        "A100-80",
        "T4",
    }
    for name, wrong, fix in (
        ("v6e", "fp8", "=int8"),
        ("tpu7x", "int8", "=fp8"),
        ("H100", "int8", "=fp8"),
        ("v4", "int8", ""),
    ):
        with pytest.raises(UserError) as caught:
            require_matmul(chip_named(name), wrong)
        assert_error(caught.value, "E-HARDWARE-120", what=name, fix=f"precision.matmul{fix}")
    require_matmul(chip_named("v4"), None)
    require_matmul(chip_named("H100"), "fp8")


def test_a_companion_has_no_codes() -> None:
    """A teacher beside the trained model is computed as it was before."""
    found = eight_bit_weights(ResolvedJob(job()), WithCompanion(SPECS, SPECS), "cpu", "cpu", 64)
    assert found is not None
    assert list(found.matrices) == [".own['layers']['up']"]
    arrays = initial({"layers": {"up": SPECS["layers"]["up"]}}, jax.random.key(0))
    params = found.with_codes(
        WithCompanion(arrays, arrays), found.codes(WithCompanion(arrays, arrays)), jax.random.key(1)
    )
    assert isinstance(params.own["layers"]["up"], EightBit)
    assert isinstance(params.companion["layers"]["up"], Dense)
    assert params.own["layers"]["up"].codes.forward.shape == (2, 16, 32)
    assert params.own["layers"]["up"].seed.shape == (2,)
    assert len(set(params.own["layers"]["up"].seed.tolist())) == 2


def test_weights_of_a_program_on_each_platform() -> None:
    kind = device_kind_of(chip_named("v6e"))
    assert kind is not None
    on_tpu = eight_bit_weights(ResolvedJob(job()), SPECS, "tpu", kind, 64)
    on_cpu = eight_bit_weights(ResolvedJob(job()), SPECS, "cpu", "cpu", 64)
    assert on_tpu is not None
    assert on_cpu is not None
    assert list(on_tpu.matrices) == ["['layers']['up']"]
    assert not on_tpu.how.floats
    assert on_cpu.how.floats
    assert "int8 for 1" in str(eight_bit_note(ResolvedJob(job()), on_cpu))
    assert "slower" in str(eight_bit_note(ResolvedJob(job()), on_cpu))
    assert "slower" not in str(eight_bit_note(ResolvedJob(job()), on_tpu))
    assert eight_bit_note(ResolvedJob(job()), None) is None
    with pytest.raises(UserError) as caught:
        eight_bit_weights(ResolvedJob(job(precision={"matmul": "fp8"})), SPECS, "tpu", kind, 64)
    assert_error(caught.value, "E-HARDWARE-120", what="v6e")
    with pytest.raises(UserError) as caught:
        eight_bit_weights(ResolvedJob(job()), {"gate": SPECS["layers"]["gate"]}, "cpu", "cpu", 64)
    assert_error(caught.value, "E-METHOD-125", what="int8")
