"""Names of GPU machines: accepted spellings, and the suggestion for each usual mistake."""

from __future__ import annotations

import pytest
from error_assertions import raises_error

from forerun.errors import UserError
from forerun.hardware.slices import gpu_machines, slice_named


@pytest.mark.parametrize(
    ("name", "chip", "devices", "hosts", "topology"),
    [
        ("h100-8", "H100", 8, 1, "1x1x8"),
        ("h100-8x2", "H100", 16, 2, "1x2x8"),
        ("a100-80-1", "A100-80", 1, 1, "1x1x1"),
        ("a100-40-4", "A100-40", 4, 1, "1x1x4"),
        ("h100-pcie-2", "H100-PCIe", 2, 1, "1x1x2"),
        ("4090-1", "4090", 1, 1, "1x1x1"),
        ("h200-8x64", "H200", 512, 64, "1x64x8"),
    ],
)
def test_machines(name: str, chip: str, devices: int, hosts: int, topology: str) -> None:
    found = slice_named(name)
    assert (found.chip.name, found.chips, found.devices, found.hosts) == (chip, devices, devices, hosts)
    assert (found.name, found.topology, found.platform) == (name, topology, "gpu")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("rtx4090-1", "4090-1"),
        ("RTX 5090-2", "5090-2"),
        ("h100-sxm-8", "h100-8"),
        ("H100-SXM5-8x2", "h100-8x2"),
        ("h100-80gb-8", "h100-8"),
        ("h100-8x1", "h100-8"),
        ("a100-80gb-8", "a100-80-8"),
        ("a100_sxm4_40gb-8", "a100-40-8"),
        ("nvidia-l40s-1", "l40s-1"),
    ],
)
def test_other_spellings(name: str, same: str) -> None:
    assert slice_named(name) == slice_named(same)
    assert slice_named(name).name == same


@pytest.mark.parametrize(
    ("name", "code", "use"),
    [
        ("h100", "E-HARDWARE-019", "use h100-8,"),
        ("h100x8", "E-HARDWARE-019", "use h100-8,"),
        ("8xh100", "E-HARDWARE-019", "use h100-8,"),
        ("h100:8", "E-HARDWARE-019", "use h100-8,"),
        ("16xh100", "E-HARDWARE-019", "use h100-8x2,"),
        ("a100-8", "E-HARDWARE-019", "use a100-80-8,"),
        ("a100-80", "E-HARDWARE-019", "use a100-80-8,"),
        ("a100-40", "E-HARDWARE-019", "use a100-40-8,"),
        ("2xa100", "E-HARDWARE-019", "use a100-80-2,"),
        ("4090", "E-HARDWARE-019", "use 4090-1,"),
        ("h1oo-8", "E-HARDWARE-019", "use h100-8,"),
        ("h100-3", "E-HARDWARE-020", "use h100-4,"),
        ("h100-16", "E-HARDWARE-020", "use h100-8x2,"),
        ("h100-0", "E-HARDWARE-020", "use h100-1,"),
        ("h100-8x65", "E-HARDWARE-020", "use h100-8x64,"),
        ("4090-16", "E-HARDWARE-020", "use 4090-8,"),
        ("4090-8x2", "E-HARDWARE-022", "4090-8;"),
        ("h100-pcie-8x2", "E-HARDWARE-022", "h100-pcie-8;"),
    ],
)
def test_mistakes_have_a_suggestion(name: str, code: str, use: str) -> None:
    with pytest.raises(UserError) as error:
        slice_named(name)
    assert error.value.code == code
    assert use in error.value.fix
    assert name in error.value.what


@pytest.mark.parametrize("name", ["v100-8", "rtx3090-1", "gb200-4", "mi300x-8", "h20-8", "l40-1"])
def test_gpus_outside_the_table_are_not_replaced_by_another(name: str) -> None:
    with raises_error("E-HARDWARE-019") as error:
        slice_named(name)
    assert "did you mean" not in error.value.what
    assert "h100-pcie" in error.value.why


def test_every_listed_machine_is_found_by_its_name() -> None:
    assert len(gpu_machines()) == 44
    for machine in gpu_machines():
        assert slice_named(machine.name) == machine
        assert slice_named(machine.name.upper()) == machine
