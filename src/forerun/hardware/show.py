"""The hardware tables as aligned plain text of at most 100 columns, followed by dates and sources."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UserError
from forerun.hardware.chips import chips
from forerun.hardware.gpus import MEMORY_SHARE
from forerun.hardware.prices import check_zone, prices
from forerun.hardware.slices import slices
from forerun.units import GIB


def chips_table() -> str:
    """Return the tables of TPU chips and of GPUs: rates, memory, links."""
    sources = [f"  {chip.name:9} {chip.date}  {chip.source}" for chip in chips()]
    notes = [
        "-: no figure found. Rates are those of the data sheet, dense, for a complete chip.",
        "HBM: as the vendor states it. usable: TPU: the limit of the compiler. GPU: the share",
        f"({MEMORY_SHARE:.0%}) of its memory that train reserves. ICI: all links, both ways.",
        "NVLink, PCIe, network: one way. network: per GPU, between machines.",
    ]
    return "\n".join([*_tpu_lines(), "", *_gpu_lines(), "", *notes, "sources:", *sources])


def _tpu_lines() -> list[str]:
    head = ("chip", "bf16", "8-bit", "HBM", "usable", "HBM", "ICI", "devices", "chips", "VMEM")
    units = ("", "TFLOP/s", "TOP/s", "GB", "GiB/device", "GB/s", "GB/s", "/chip", "/host", "MiB/core")
    rows = [
        (
            chip.name,
            _number(chip.bf16_flops, 1e12),
            _number(chip.int8_ops, 1e12),
            _number(chip.hbm_nominal_bytes, GIB),
            _number(chip.usable_bytes, GIB, ".2f"),
            _number(chip.hbm_bytes_per_second, 1e9),
            _number(chip.ici_bytes_per_second, 1e9),
            str(chip.devices_per_chip),
            _number(chip.chips_per_host, 1),
            _number(chip.vmem_bytes, 1 << 20),
        )
        for chip in chips()
        if chip.is_tpu
    ]
    return _aligned([head, units, *rows], left=1, rule_after=2)


def _gpu_lines() -> list[str]:
    head = ("GPU", "bf16", "fp8", "int8", "HBM", "usable", "HBM", "NVLink", "PCIe", "network", "sm")
    units = ("", "TFLOP/s", "TFLOP/s", "TOP/s", "GB", "GiB", "GB/s", "GB/s", "GB/s", "GB/s", "")
    rows = [
        (
            chip.name,
            _number(chip.bf16_flops, 1e12),
            _number(gpu.fp8_flops, 1e12),
            _number(chip.int8_ops, 1e12),
            _number(chip.hbm_nominal_bytes, GIB),
            _number(chip.usable_bytes, GIB, ".1f"),
            _number(chip.hbm_bytes_per_second, 1e9),
            _number(gpu.nvlink_bytes_per_second, 1e9),
            _number(gpu.pcie_bytes_per_second, 1e9),
            _number(gpu.network_bytes_per_second, 1e9, ",.4g"),
            "{}.{}".format(*gpu.compute_capability),
        )
        for chip in chips()
        if (gpu := chip.gpu)
    ]
    return _aligned([head, units, *rows], left=1, rule_after=2)


def slices_table() -> str:
    """Return the table of standard slices: chips, devices, hosts, memory, topology."""
    head = ("slice", "chips", "devices", "hosts", "usable GiB", "topology")
    rows = [
        (
            entry.name,
            str(entry.chips),
            str(entry.devices),
            str(entry.hosts),
            f"{(entry.chip.usable_bytes or 0) * entry.devices / GIB:,.0f}",
            entry.topology,
        )
        for entry in slices()
    ]
    notes = [
        "The number in a name counts TensorCores for v2, v3, v4, v5p (two per chip) and chips for v5e, v6e;",
        "tpu7x is named by its topology. v5litepod-8 is v5e-8. Other shapes: v5p:8x8x24.",
        "sources: Cloud TPU page of each generation; devices and hosts from libtpu 0.0.42, 2026-11",
    ]
    return "\n".join([*_aligned([head, *rows], left=1, rule_after=1), "", *notes])


def prices_table(prices_file: str | None = None, zone: str | None = None) -> str:
    """Return the table of prices by chip and zone, for all zones or one."""
    known = prices(prices_file)
    if zone is not None:
        check_zone(zone, known)
    order = {chip.name: index for index, chip in enumerate(chips())}
    shown = sorted(
        (price for price in known if zone in (None, price.zone)),
        key=lambda price: (order[price.generation], price.usd_per_chip_hour_on_demand, price.zone, price.kind),
    )
    head = ("chip", "zone", "kind", "on demand", "spot", "as of")
    rows = [
        (
            price.generation,
            price.zone,
            price.kind or "-",
            f"{price.usd_per_chip_hour_on_demand:.4f}",
            "-" if price.usd_per_chip_hour_spot is None else f"{price.usd_per_chip_hour_spot:.4f}",
            price.date,
        )
        for price in shown
    ]
    sources = dict.fromkeys(f"  {price.date}  {price.source}" for price in shown)
    notes = [
        "USD per chip-hour; multiply by the chips of the slice. Spot moves 2-3x within a year.",
        "sources:",
        *sources,
    ]
    return "\n".join([*_aligned([head, *rows], left=3, rule_after=1), "", *notes])


TABLES = {"chips": chips_table, "slices": slices_table}


def table(name: str, prices_file: str | None = None, zone: str | None = None) -> str:
    """Return the table with the name chips, slices or prices."""
    if name == "prices":
        return prices_table(prices_file, zone)
    if name not in TABLES:
        raise UserError(
            "E-HARDWARE-016",
            f"no table is called {name!r}",
            why="known: chips, slices, prices",
            fix="forerun hardware chips",
        )
    return TABLES[name]()


def _number(value: float | None, unit: float, form: str = ",.0f") -> str:
    return "-" if value is None else format(value / unit, form)


def _aligned(rows: Sequence[Sequence[str]], left: int, rule_after: int) -> list[str]:
    """Return lines with aligned columns: the first `left` columns to the left, the others to the right.

    A rule follows the first `rule_after` rows.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "  ".join("-" * width for width in widths)
    return [*lines[:rule_after], rule, *lines[rule_after:]]
