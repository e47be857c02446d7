from __future__ import annotations

import re
import subprocess
import sys

import pytest
from error_assertions import raises_error

from forerun.hardware.chips import chip_named, chip_of_device_kind, chips, require_compute_dtype, target_description
from forerun.hardware.slices import CORES_PER_CHIP
from forerun.units import GIB, MIB

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
    with raises_error("E-HARDWARE-001", "A100-40") as error:
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


# The table of GPUs, against the values of openxla's descriptions of real devices.

# core_count, fpus_per_core, clock_rate_ghz, memory_bandwidth, l2_cache_size, device_memory_size,
# shared_memory_per_core, shared_memory_per_block_optin, threads_per_core_limit, accelerated features
OPENXLA = {
    "H100": (132, 128, 1.98, 3352320000000, 52428800, 84942979072, 233472, 232448, 2048, True),
    "H100-PCIe": (114, 128, 1.755, 2039040000000, 52428800, 84942979072, 233472, 232448, 2048, True),
    "H200": (132, 128, 1.98, 4800000000000, 52428800, 151397597184, 233472, 232448, 2048, True),
    "B200": (148, 128, 1.965, 7672320000000, 132644864, 191514411008, 233472, 232448, 2048, True),
    "A100-40": (108, 64, 1.41, 1555200000000, 41943040, 42331013120, 167936, 166912, 2048, False),
    "A100-80": (108, 64, 1.41, 2039040000000, 41943040, 85100068864, 167936, 166912, 2048, False),
}
GPUS = [chip.name for chip in chips() if chip.gpu]


def described(name: str) -> dict[str, str]:
    """Return the fields of the description by name."""
    chip = chip_named(name)
    assert chip.gpu is not None
    assert chip.hbm_bytes_per_second is not None
    return dict(re.findall(r"(\w+): (\S+)", target_description(chip.gpu, chip.hbm_bytes_per_second)))


@pytest.mark.parametrize("name", OPENXLA)
def test_descriptions_agree_with_openxla(name: str) -> None:
    found = described(name)
    cores, fpus, clock, bandwidth, l2, memory, shared, block, threads, accelerated = OPENXLA[name]
    assert int(found["core_count"]) == cores
    assert int(found["fpus_per_core"]) == fpus
    assert float(found["clock_rate_ghz"]) == pytest.approx(clock)
    assert float(found["memory_bandwidth"]) == pytest.approx(bandwidth, rel=1e-4)
    assert int(found["l2_cache_size"]) == pytest.approx(l2, abs=MIB / 2)
    assert int(found["shared_memory_per_core"]) == shared
    assert int(found["shared_memory_per_block_optin"]) == block
    assert int(found["threads_per_core_limit"]) == threads
    assert (found.get("feature_extension") == "ACCELERATED_FEATURES") is accelerated
    # Never more than the device has. openxla writes the nominal memory of an H200.
    difference = memory - int(found["device_memory_size"])
    assert 0 <= difference < (1.3 if name == "H200" else 0.1) * GIB


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_consistent(name: str) -> None:
    chip = chip_named(name)
    specs = chip.gpu
    assert specs is not None
    assert specs.memory_bytes < chip.hbm_nominal_bytes
    assert chip.usable_bytes == pytest.approx(0.9 * specs.memory_bytes, abs=1)
    # A multiply-add of each unit in each cycle is the fp32 peak; tensor cores are faster.
    fp32 = 2 * specs.cores * specs.fpus_per_core * specs.clock_hz
    assert specs.fp16_flops is not None
    assert 1.9 < specs.fp16_flops / fp32 < 32
    assert chip.bf16_flops in (None, specs.fp16_flops)
    if specs.fp8_flops is not None:
        assert specs.fp8_flops == pytest.approx(2 * specs.fp16_flops, rel=0.02)
    assert specs.shared_bytes_per_block <= specs.shared_bytes_per_core
    if specs.network_bytes_per_second is not None:
        assert specs.nvlink_bytes_per_second is not None
        assert specs.network_bytes_per_second < specs.nvlink_bytes_per_second


def test_only_gpus_without_a_unit_refuse_bfloat16() -> None:
    for name in GPUS:
        if name != "T4":
            require_compute_dtype(chip_named(name), "bfloat16")
    require_compute_dtype(chip_named("v2"), "bfloat16")
    require_compute_dtype(chip_named("T4"), "float32")
    with raises_error("E-HARDWARE-023"):
        require_compute_dtype(chip_named("T4"), "bfloat16")
