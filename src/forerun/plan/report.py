"""Verdicts as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.errors import UserError
from forerun.plan.verdict import Verdict
from forerun.units import GIB, Bytes

PARTS = (("weights", "cyan"), ("optimizer", "blue"), ("gradients + activations", "magenta"))
BAR_WIDTHS = (24, 16, 10)
DROPPED_WHEN_NARROW = ("compile s", "devices", "chips", "mesh", "optimizer", "weights", "gradients +\nactivations")


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Keys are stable: programs read them. Bytes are of one device."""
    return {"slices": [_slice_json(v) for v in verdicts]}


def _slice_json(v: Verdict) -> dict[str, Any]:
    return {
        "slice": v.question.slice.name,
        "fits": v.fits,
        "hbm_peak_bytes": int(v.memory.peak_bytes),
        "hbm_limit_bytes": int(v.limit_bytes),
        "compile_seconds": round(float(v.compile_seconds), 3),
        "chips": v.question.slice.chips,
        "devices": v.question.slice.devices,
        "mesh": v.mesh,
        "program": v.program,
        "hbm_weights_bytes": int(v.memory.weights_bytes),
        "hbm_optimizer_bytes": int(v.memory.optimizer_bytes),
        "hbm_batch_bytes": int(v.memory.batch_bytes),
        "hbm_working_bytes": int(v.memory.working_bytes),
        "host_bytes": int(v.memory.host_bytes),
    }


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Verdict], Text | str]
    justify: Literal["left", "right"] = "right"


def print_table(console: Console, verdicts: Sequence[Verdict], title: str) -> None:
    """The widest layout that the console has room for. Figures are never cut: the least needed columns go first."""
    ascii_only = not console.encoding.lower().startswith("utf")
    columns = _columns(verdicts)
    layouts = [_with_bar(columns, width, ascii_only) for width in BAR_WIDTHS]
    layouts += [[c for c in columns if c.heading not in DROPPED_WHEN_NARROW[:n]] for n in range(8)]
    tables = [_table(layout, verdicts, ascii_only) for layout in layouts]
    roomy = console.options.update(width=1000)
    widths = [console.measure(table, options=roomy).maximum for table in tables]
    chosen = next((n for n, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])  # rather a broken line than a missing figure
    console.print(Text(title, style="bold"), "", sep="\n")
    console.print(tables[chosen])
    console.print("", _notes(verdicts, ascii_only if chosen < len(BAR_WIDTHS) else None), sep="\n")


def _columns(verdicts: Sequence[Verdict]) -> list[Column]:
    columns = [
        Column("slice", lambda v: Text(v.question.slice.name, style="bold"), "left"),
        Column("chips", lambda v: str(v.question.slice.chips)),
        Column("devices", lambda v: str(v.question.slice.devices)),
        Column("mesh", lambda v: v.mesh, "left"),
        Column("fits", _fits, "left"),
        Column("peak", lambda v: _gib(v.memory.peak_bytes)),
        Column("usable", lambda v: _gib(v.limit_bytes)),
        Column("weights", lambda v: _gib(v.memory.weights_bytes)),
        Column("optimizer", lambda v: _gib(v.memory.optimizer_bytes)),
        Column("gradients +\nactivations", lambda v: _gib(_parts(v)[2])),
        Column("compile s", lambda v: f"{v.compile_seconds:.1f}"),
    ]
    if not _split_chips(verdicts):
        columns = [column for column in columns if column.heading != "devices"]
    return columns


def _with_bar(columns: Sequence[Column], width: int, ascii_only: bool) -> list[Column]:
    """The bar stands with the limit at its end, in place of the plain limit."""
    bar = Column("usable HBM", lambda v: _bar(v, width, ascii_only), "left")
    return [bar if column.heading == "usable" else column for column in columns]


def _table(columns: Sequence[Column], verdicts: Sequence[Verdict], ascii_only: bool) -> Table:
    lines = box.ASCII2 if ascii_only else box.SIMPLE_HEAD
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True, vertical="bottom")
    for v in verdicts:
        table.add_row(*(column.cell(v) for column in columns))
    return table


def _gib(n: int) -> str:
    return f"{n / GIB:.2f}"


def _fits(v: Verdict) -> Text:
    return Text("yes", style="green") if v.fits else Text(f"{_gib(-v.spare_bytes)} short", style="bold red")


def _parts(v: Verdict) -> tuple[int, int, int]:
    """Weights, optimizer and all the rest, in the order of PARTS; they add up to the peak."""
    return v.memory.weights_bytes, v.memory.optimizer_bytes, v.memory.working_bytes + v.memory.batch_bytes


def _bar(v: Verdict, width: int, ascii_only: bool) -> Text:
    """Blocks for what is used, dots for what is free, then the limit. Too large a job overflows in red."""
    bar = Text()
    full, free = ("#", ".") if ascii_only else ("█", "·")
    scale = width / v.limit_bytes
    used = 0
    for part, (_, colour) in zip(_parts(v), PARTS, strict=True):
        end = min(width, round((used + part) * scale))
        bar.append(full * (end - len(bar)), style=colour)
        used += part
    if not v.fits and len(bar) == width:
        bar.right_crop(1)
        bar.append(">" if ascii_only else "▶", style="bold red")
    bar.append(free * (width - len(bar)), style="dim")
    return bar.append(f" {_gib(v.limit_bytes):>5}")


def _split_chips(verdicts: Sequence[Verdict]) -> list[str]:
    """The generations whose chips show themselves as two devices."""
    chips = {v.question.slice.chip for v in verdicts}
    return sorted(chip.name for chip in chips if chip.devices_per_chip == 2)


def _notes(verdicts: Sequence[Verdict], ascii_only: bool | None) -> RenderableType:
    """The legend of the bar (not for None: there is no bar), and what the figures are."""
    notes = Text()
    if ascii_only is not None:
        for n, (name, colour) in enumerate(PARTS):
            notes.append("   " if n else "").append("#" if ascii_only else "█", style=colour).append(f" {name}")
        notes.append("\n")
    split = _split_chips(verdicts)
    per = f"device; a chip of {' and '.join(split)} is two devices" if split else "chip"
    notes.append(f"GiB per {per}. By the TPU compiler's own memory report.", style="dim")
    for v in verdicts:
        if v.memory.host_bytes >= GIB / 100:
            more = f"{v.question.slice.name}: {v.memory.host_bytes} per device wait in host memory"
            notes.append(f"\n{more}", style="yellow")
    return notes


def does_not_fit(verdicts: Sequence[Verdict]) -> UserError:
    """None of the slices holds the job: by how much, and what makes a job smaller."""
    nearest = max(verdicts, key=lambda v: v.spare_bytes / v.limit_bytes)
    name, memory = nearest.question.slice.name, nearest.memory
    resting = Bytes(memory.weights_bytes + memory.optimizer_bytes)
    why = f"{name} needs {memory.peak_bytes} of HBM per device and has {nearest.limit_bytes}: "
    why += f"{Bytes(-nearest.spare_bytes)} short"
    if resting > nearest.limit_bytes:
        why += f"; weights and optimizer alone are {resting}"
    return UserError(
        f"the job does not fit {name}" if len(verdicts) == 1 else f"the job fits none of these {len(verdicts)} slices",
        why=why,
        fix="try, and plan again:\n" + "\n".join(f"- {one}" for one in _remedies(nearest, resting)),
    )


def _remedies(v: Verdict, resting: Bytes) -> list[str]:
    """What may help this job on this slice, mildest first."""
    job, mesh = v.question.job, v.question.mesh_shape()
    share = job.batch // mesh.data_parallel
    micro = job.micro_batch or share
    tries = []
    if resting < v.limit_bytes:
        if micro > 1:
            divisors = [n for n in range(micro - 1, 0, -1) if share % n == 0]
            room = v.limit_bytes - resting
            smaller = next((n for n in divisors if v.memory.working_bytes * n / micro <= room), 1)
            tries.append(f"micro_batch={smaller} (the batch stays {job.batch}, by accumulation)")
        if job.remat.policy in ("none", "dots"):
            tries.append("remat=full")
        elif job.remat.policy == "full":
            tries.append("'remat={policy: named, offload: [layer_in]}' (layer inputs wait in host memory)")
    if mesh.fsdp == 1 and mesh.data > 1:
        tries.append("mesh.data=1 mesh.fsdp=-1 (weights and optimizer split over the devices)")
    return [*tries, "a slice with more chips or memory: forerun hardware slices"]
