"""The table at every width, and the words for a job that fits nowhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.plan.memory import MemoryReport
from forerun.plan.question import Question
from forerun.plan.report import as_json, does_not_fit, print_table
from forerun.plan.verdict import Verdict
from forerun.units import GIB, Bytes, Seconds


def verdict_on(name: str, peak: float, weights: float, optimizer: float, host: float = 0, **job: object) -> Verdict:
    wanted = {"model": "qwen3-0.6b", "data": "nothing", "batch": 1024, "steps": 5, **job}
    question = Question(Job.model_validate(wanted), slice_named(name))
    memory = MemoryReport(*(Bytes(n * GIB) for n in (peak, weights, optimizer, 0.001, host)))
    fits = memory.peak_bytes <= (question.slice.chip.usable_bytes or 0)
    return Verdict(question, memory, fits, Seconds(11.53), "0123456789ab", str(question.mesh_shape()))


SMALL = verdict_on("v6e-1", 12.44, 2.22, 4.44)
LARGE = verdict_on("v5p-2048", 103.38, 10.5, 21.25)
SPLIT = verdict_on("tpu7x-2x2x1", 94.3, 1, 2, host=3)


def printed(verdicts: list[Verdict], width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_table(Console(file=file, width=width), verdicts, "q: qwen3-0.6b")
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    lines = printed([SMALL, LARGE, SPLIT], width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in ("v6e-1", "v5p-2048", "tpu7x-2x2x1")}
    assert re.search(r"yes .*12\.44 .*31\.25", rows["v6e-1"])
    assert re.search(r"7\.64 short .*103\.38 .*95\.74", rows["v5p-2048"])
    headings = next(line for line in lines if line.startswith("slice"))
    assert headings.split()[:1] == ["slice"]
    assert "usable" in headings


def test_what_goes_first_when_narrow() -> None:
    wide, middle, narrow = (" ".join(printed([SMALL, LARGE, SPLIT], width)) for width in (130, 100, 60))
    assert "█" in wide
    assert "compile s" in wide
    assert "devices" in middle
    assert "compile s" not in middle
    assert "optimizer" not in narrow


def test_tiny_terminal_breaks_lines_rather_than_figures() -> None:
    assert any("31.25" in line and "12.44" in line for line in printed([SMALL], 20))


def test_devices_are_told_only_where_a_chip_has_two() -> None:
    assert "GiB per chip." in " ".join(printed([SMALL, LARGE], 120))
    lines = " ".join(printed([SMALL, SPLIT], 120))
    assert "GiB per device; a chip of tpu7x is two devices." in lines
    assert "tpu7x-2x2x1: 3.00 GiB per device wait in host memory" in lines
    assert re.search(r"tpu7x-2x2x1 +4 +8 ", lines)


def test_rows_add_up_to_the_peak() -> None:
    row = next(line for line in printed([SMALL], 120) if line.startswith("v6e-1"))
    weights, optimizer, rest = map(float, row.split()[-4:-1])
    assert weights + optimizer + rest == pytest.approx(12.44, abs=0.011)


def test_bar_is_to_scale() -> None:
    row = next(line for line in printed([SMALL], 120) if line.startswith("v6e-1"))
    used, free = row.count("█"), row.count("·")
    assert used + free == 24
    assert used == round(24 * 12.44 / 31.25)


def test_terminal_without_unicode() -> None:
    assert "#" in " ".join(printed([SMALL, LARGE], 120, encoding="latin-1"))


def test_json_keys_are_frozen() -> None:
    [row] = as_json([SPLIT])["slices"]
    assert list(row) == [
        "slice",
        "fits",
        "hbm_peak_bytes",
        "hbm_limit_bytes",
        "compile_seconds",
        "chips",
        "devices",
        "mesh",
        "program",
        "hbm_weights_bytes",
        "hbm_optimizer_bytes",
        "hbm_batch_bytes",
        "hbm_working_bytes",
        "host_bytes",
    ]
    parts = ("weights", "optimizer", "batch", "working")
    assert sum(row[f"hbm_{part}_bytes"] for part in parts) == row["hbm_peak_bytes"]
    assert (row["chips"], row["devices"], row["compile_seconds"]) == (4, 8, 11.53)


def test_remedies_follow_from_the_job() -> None:
    error = does_not_fit([verdict_on("v5e-8", 20, 0.3, 0.6)])
    assert error.what == "the job does not fit v5e-8"
    assert error.why == "v5e-8 needs 20.00 GiB of HBM per device and has 15.75 GiB: 4.25 GiB short"
    assert "micro_batch=64 " in error.fix
    assert "offload: [layer_in]" in error.fix
    assert "remat=full" in does_not_fit([verdict_on("v5e-8", 20, 0.3, 0.6, remat="none")]).fix
    copies = does_not_fit([verdict_on("v5e-8", 20, 6, 12, mesh={"data": -1, "fsdp": 1})])
    assert "mesh.data=1 mesh.fsdp=-1" in copies.fix
    assert "weights and optimizer alone are 18.00 GiB" in copies.why
    assert "micro_batch" not in copies.fix


def test_the_nearest_slice_is_told() -> None:
    error = does_not_fit([verdict_on("v5e-8", 40, 1, 2), LARGE])
    assert error.what == "the job fits none of these 2 slices"
    assert error.why.startswith("v5p-2048 needs 103.38 GiB")
