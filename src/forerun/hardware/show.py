"""The hardware tables as aligned plain text of at most 100 columns, followed by dates and sources."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.hardware.chips import chips
from forerun.hardware.device_memory import memory_share
from forerun.hardware.gpu_names import GPU_COUNTS
from forerun.hardware.prices import Price, check_providers, check_zone, prices
from forerun.hardware.slices import gpu_machines, slices
from forerun.units import GIB


def chips_table() -> str:
    """Return the tables of TPU chips and of GPUs: rates, memory, links."""
    sources = [f"  {chip.name:9} {chip.date}  {chip.source}" for chip in chips()]
    notes = [
        "-: no figure found. Rates: data sheet, dense, of a complete chip.",
        "HBM: as the vendor states it. usable: of a TPU the limit of the compiler, of a",
        f"GPU the share ({memory_share().share:.0%}) of its memory that train reserves.",
        "ICI: all links, both ways. NVLink, PCIe, network: one way. network: per GPU,",
        "between machines.",
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
    head = ("GPU", "bf16", "fp8", "int8", "HBM", "usable", "HBM", "NVLink", "PCIe", "network")
    units = ("", "TFLOP/s", "TFLOP/s", "TOP/s", "GB", "GiB", "GB/s", "GB/s", "GB/s", "GB/s")
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
        )
        for chip in chips()
        if (gpu := chip.gpu)
    ]
    return _aligned([head, units, *rows], left=1, rule_after=2)


def slices_table() -> str:
    """Return the table of standard slices and GPU machines: chips, devices, hosts, memory, topology."""
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
        for entry in (*slices(), *gpu_machines())
    ]
    notes = [
        "The number in a name counts TensorCores for v2, v3, v4, v5p (two per chip) and",
        "chips for v5e, v6e; tpu7x is named by its topology. v5litepod-8 is v5e-8.",
        "Other shapes: v5p:8x8x24. A GPU machine is the GPU and the number of GPUs.",
        "h100-8x2 is two machines with 8 GPUs each.",
        "sources: Cloud TPU page of each generation; devices and hosts from",
        "libtpu 0.0.42, 2026-11",
    ]
    return "\n".join([*_aligned([head, *rows], left=1, rule_after=1), "", *notes])


def prices_table(prices_file: str | None = None, zone: str | None = None, providers: Sequence[str] = ()) -> str:
    """Return the tables of prices: TPUs by zone, and GPUs by provider. A zone or providers select rows."""
    known = prices(prices_file)
    if zone is not None:
        check_zone(zone, known)
    check_providers(providers, known)
    shown = [one for one in known if zone in (None, one.zone) and (not providers or one.provider in providers)]
    is_tpu = {chip.name: chip.is_tpu for chip in chips()}
    tpus, gpus = ([one for one in shown if is_tpu[one.generation] is want] for want in (True, False))
    blocks = [_tpu_prices(tpus)] if tpus else []
    blocks += [_gpu_prices(gpus)] if gpus else []
    notes = ["USD per chip-hour; multiply by the chips of the slice.", "Spot moves 2-3x within a year."]
    if gpus:
        notes += [
            "GPUs: per GPU-hour in machines with 1, 2, 4 or 8 GPUs, in the cheapest zone of",
            "the provider. gcp includes the machine. Two machines cost twice as much.",
            "spot: the lowest of the row.",
        ]
    sources = dict.fromkeys(f"  {price.date}  {price.source}" for price in shown)
    return "\n".join(
        [*"\n\n".join("\n".join(block) for block in blocks).splitlines(), "", *notes, "sources:", *sources]
    )


def _tpu_prices(shown: Sequence[Price]) -> list[str]:
    order = {chip.name: index for index, chip in enumerate(chips())}
    head = ("chip", "zone", "kind", "on demand", "spot", "as of")
    rows = [
        (
            price.generation,
            price.place,
            price.kind or "-",
            f"{price.usd_per_chip_hour_on_demand:.4f}",
            "-" if price.usd_per_chip_hour_spot is None else f"{price.usd_per_chip_hour_spot:.4f}",
            price.date,
        )
        for price in sorted(
            shown, key=lambda one: (order[one.generation], one.usd_per_chip_hour_on_demand, one.place, one.kind)
        )
    ]
    return _aligned([head, *rows], left=3, rule_after=1)


def _gpu_prices(shown: Sequence[Price]) -> list[str]:
    head = ("GPU", "provider", *("1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"), "spot", "as of")
    order = {chip.name: index for index, chip in enumerate(chips())}
    groups = sorted({(order[one.generation], one.generation, one.provider) for one in shown})
    rows = []
    for _, gpu, provider in groups:
        own = [
            one
            for one in shown
            if (one.generation, one.provider) == (gpu, provider) and one.chips in (None, *GPU_COUNTS)
        ]
        spot = min((one.usd_per_chip_hour_spot for one in own if one.usd_per_chip_hour_spot is not None), default=None)
        by_count = [
            min((one.usd_per_chip_hour_on_demand for one in own if one.chips in (None, count)), default=None)
            for count in GPU_COUNTS
        ]
        rows.append((gpu, provider, *(_number(usd, 1, ".2f") for usd in (*by_count, spot)), max(o.date for o in own)))
    return _aligned([head, *rows], left=2, rule_after=1)


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
