"""The compiler's two texts, cut down to their form, with sizes that can be added up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.planner.memory.memory_report import Unreadable, argument_bytes, memory_report, space_totals

REPORT = """Memory Space: default (color=0)
Total bytes: 1000 (1000B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       600B( 60%);       600B;            0;                1; f32[150]

Memory Space: vmem (color=1)
Total bytes: 64 (64B)

Memory Space: {host}
Total bytes: 77 (77B)


"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 600, preallocated-temp:
 value: <1 fusion @0> (size=600,offset=0): f32[150]
allocation 1: size 4,{page} parameter 0, shape |s32[]| at ShapeIndex {{}}, maybe-live-out:
allocation 2: size 100,{page} parameter 1, shape |f32[25]| at ShapeIndex {{}}, maybe-live-out:
allocation 3: size 200,{page} parameter 2, shape |f32[50]| at ShapeIndex {{}}, maybe-live-out:
allocation 4: size 48,{page} parameter 3, shape |s32[12]| at ShapeIndex {{}}:
allocation 5: size 500, color 5,{page} parameter 4, shape |f32[125]| at ShapeIndex {{}}:
"""
GROUPS = ["optimizer", "weights", "optimizer", "batch", "optimizer"]


def write(folder: Path, host: str, page: str) -> None:
    (folder / "m.after_optimizations-memory-usage-report.txt").write_text(REPORT.format(host=host))
    (folder / "m.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT.format(page=page))
    (folder / "m.after_optimizations_before_buffer_assignment.txt").write_text("HloModule m")


@pytest.mark.parametrize(("host", "page"), [("cmem (color=5)", ""), ("host (color=4)", " page 0,")])
def test_ledger_of_both_compilers(tmp_path: Path, host: str, page: str) -> None:
    write(tmp_path, host, page)
    report = memory_report(tmp_path, GROUPS)
    assert (report.peak_bytes, report.weights_bytes, report.optimizer_bytes) == (1000, 100, 204)
    assert (report.batch_bytes, report.working_bytes, report.host_bytes) == (48, 648, 77)


@pytest.mark.parametrize("keep", [0, 20, 40, 200])
def test_half_a_report_is_none(keep: int) -> None:
    with pytest.raises(Unreadable):
        space_totals(REPORT.format(host="host (color=4)")[:keep])


def test_half_an_assignment_is_none() -> None:
    text = ASSIGNMENT.format(page="")
    assert argument_bytes(text, GROUPS)["batch"] == 48
    with pytest.raises(Unreadable, match="lacks 2 of the step's 5"):
        argument_bytes(text[: text.index("allocation 4")], GROUPS)


def test_more_arguments_than_the_step_has() -> None:
    with pytest.raises(Unreadable, match="argument 4"):
        argument_bytes(ASSIGNMENT.format(page=""), GROUPS[:4])


def test_arguments_larger_than_all(tmp_path: Path) -> None:
    write(tmp_path, "host (color=4)", "")
    path = tmp_path / "m.after_optimizations-memory-usage-report.txt"
    path.write_text(path.read_text().replace("Total bytes: 1000 ", "Total bytes: 300 "))
    with pytest.raises(Unreadable, match="larger than the peak"):
        memory_report(tmp_path, GROUPS)


def test_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="there is no"):
        memory_report(tmp_path, GROUPS)
