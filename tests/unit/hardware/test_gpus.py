"""The table of GPUs, against the values of openxla's descriptions of real devices.

The values are those of openxla/xla, xla/backends/gpu/target_config/specs, read on 2026-11-18.
"""

from __future__ import annotations

import re

import pytest

from forerun.errors import UserError
from forerun.hardware.chips import chip_named, chips, require_compute_dtype
from forerun.hardware.gpus import target_description
from forerun.units import GIB, MIB

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
    with pytest.raises(UserError, match="E-HARDWARE-023"):
        require_compute_dtype(chip_named("T4"), "bfloat16")
