from __future__ import annotations

import subprocess
import sys

import pytest

from forerun.errors import UserError
from forerun.hardware.chips import chip_named, chip_of_device_kind, chips
from forerun.hardware.slices import CORES_PER_CHIP
from forerun.units import GIB

# jax keeps figures of its own, per core. Its v3 (140 TFLOP/s) differs from the data sheet's 123.
JAX_NAMES = {"v2": "v2", "v3": "v3", "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "7x"}


@pytest.mark.parametrize("name", JAX_NAMES)
def test_figures_agree_with_jax(name: str) -> None:
    from jax.experimental.pallas import tpu as pltpu

    chip, cores = chip_named(name), CORES_PER_CHIP[name]
    known = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(JAX_NAMES[name]), 1)
    assert chip.vmem_bytes == known.vmem_capacity_bytes
    assert chip.hbm_nominal_bytes == pytest.approx(known.hbm_capacity_bytes * cores, rel=0.08)
    if name != "v3":
        assert chip.bf16_flops == pytest.approx(known.bf16_ops_per_second * cores, rel=0.01)


def test_usable_memory_is_no_more_than_there_is() -> None:
    tpus = [chip for chip in chips() if chip.is_tpu]
    assert len(tpus) == 7
    for chip in tpus:
        assert chip.usable_bytes is not None
        share = chip.usable_bytes * chip.devices_per_chip / chip.hbm_nominal_bytes
        assert 0.9 < share < 1.01, chip.name


def test_every_chip_is_sourced_and_dated() -> None:
    assert all(chip.source and chip.date.startswith("20") for chip in chips())


def test_units() -> None:
    v6e = chip_named("v6e")
    assert v6e.usable_bytes == 31.25 * GIB
    assert v6e.bf16_flops == 918e12
    assert v6e.hbm_bytes_per_second == 1640e9
    assert v6e.clock_hz == 1.75e9


def test_flops_of_a_device_where_a_chip_shows_two() -> None:
    assert chip_named("tpu7x").bf16_flops_per_device == 2307e12 / 2
    assert chip_named("v5p").bf16_flops_per_device == 459e12


def test_missing_figures_are_none() -> None:
    assert chip_named("T4").bf16_flops is None
    assert chip_named("T4").bf16_flops_per_device is None
    assert chip_named("v2").ici_bytes_per_second is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v2", "v2"),
        ("TPU v3", "v3"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_device_kinds(kind: str, name: str) -> None:
    chip = chip_of_device_kind(kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A10", "NVIDIA H100 NVL", "TPU v4 lite", ""])
def test_unknown_device_kinds_have_no_chip(kind: str) -> None:
    assert chip_of_device_kind(kind) is None


def test_other_names_of_a_chip() -> None:
    assert chip_named("V5litepod").name == "v5e"
    assert chip_named("trillium").name == "v6e"
    assert chip_named("h100").name == "H100"


def test_unknown_chip() -> None:
    with pytest.raises(UserError, match=r"A100-40.*E-HARDWARE-001") as error:
        chip_named("a100-4")
    assert "forerun hardware chips" in error.value.fix


def test_hardware_does_not_import_jax() -> None:
    code = (
        "import sys, forerun.hardware.mesh, forerun.hardware.devices as d, forerun.hardware.show as s;"
        "s.chips_table(); s.slices_table(); s.prices_table(); d.ThisMachine().absence('tpu');"
        "sys.exit(any(name in sys.modules for name in ('jax', 'pandas', 'numpy')))"
    )
    paths = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=paths).returncode == 0
