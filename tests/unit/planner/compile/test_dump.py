"""A dump is taken only when all of its files are complete, wherever the compiler's writing stops."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from forerun.planner.compile import dump
from forerun.planner.compile.dump import DumpTexts, copy_dump
from forerun.planner.memory import Unreadable

# In the form of libtpu 0.0.42, with two memory spaces of 1,024 and 512 bytes.
WHOLE = DumpTexts(
    program=(
        "HloModule jit_step, is_scheduled=true\n\n%body (p: f32[8,16]) -> f32[8,16] {\n  %p = f32[8,16] parameter(0)\n"
        "  ROOT %a = f32[8,16] add(%p, %p)\n}\n\nENTRY %main (x: f32[8,16]) -> f32[8,16] {\n"
        "  %x = f32[8,16] parameter(0)\n  ROOT %f = f32[8,16] fusion(%x), kind=kLoop, calls=%body\n}\n\n"
    ),
    assignment=(
        "BufferAssignment:\nallocation 0: size 512, parameter 0, shape |f32[8,16]| at ShapeIndex {}:\n"
        " value: <0 x @0> (size=512,offset=0): f32[8,16]{1,0}\nallocation 1: size 512, maybe-live-out:\n"
        " value: <2 f @0> (size=512,offset=0): f32[8,16]{1,0}\nallocation 2: size 512, color 1, preallocated-temp:\n"
        " value: <1 t @1> (size=512,offset=0): f32[8,16]{1,0:S(1)}\n"
    ),
    values=(
        "\nTotal bytes used: 1536 (1.5KiB)\n\nUsed values:\n<0 x @0>\n positions:\n  x\n uses:\n  f, operand 0\n"
        " from instruction: %x = f32[8,16] parameter(0)\n<1 t @1>\n positions:\n  t\n uses:\n  f, operand 0\n"
        " from instruction: %t = f32[8,16] copy(%x)\n<2 f @0>\n positions:\n  f\n uses:\n  (none)\n"
        " from instruction: %f = f32[8,16] fusion(%x)\n"
    ),
    live_ranges=(
        "HloLiveRange (max 2):\n  InstructionSequence:\n    0:x\n    1:f\n  BufferLiveRange:\n"
        "    x{}:0-2\n    f{}:1-2\n  Live ranges at 1 (peak):\n    x: 512 bytes\n    f: 512 bytes\n"
        "  Stack trace breakdown for peak usage: 1 024 bytes\n"
        "      ├── x (50.0%, total: 512 bytes, current: 512 bytes, remaining: 512 bytes)\n"
        "      └── f (50.0%, total: 512 bytes, current: 512 bytes, remaining: 0 bytes)\n"
    ),
    report=(
        "Memory Space: default (color=0)\nTotal bytes: 1024 (1.0KiB)\n  cumulative_size;       size\n  ------\n"
        "  512B( 50%);  512B\n\n  cumulative_size;       size\n  ------\n  512B(100%);  512B\n\n\n"
        "Memory Space: vmem (color=1)\nTotal bytes: 512 (512B)\n  cumulative_size;       size\n  ------\n"
        "  512B(100%);  512B\n\n  cumulative_size;       size\n  ------\n  512B(100%);  512B\n\n\n"
    ),
)
NAMES = {
    "program": "m.after_optimizations.txt",
    "assignment": "m.after_optimizations-buffer-assignment.txt",
    "values": "m.after_optimizations-buffer-assignment-values.txt",
    "live_ranges": "m.after_optimizations-live-range.txt",
    "report": "m.after_optimizations-memory-usage-report.txt",
}


def prefixes(text: str) -> list[str]:
    """All beginnings of a text that lack more than white space."""
    return [text[:end] for end in range(len(text)) if text[end:].strip()]


def test_whole() -> None:
    assert WHOLE.missing_part() is None
    assert WHOLE.total_bytes == 1536


@pytest.mark.parametrize("part", [field.name for field in fields(DumpTexts)])
def test_no_beginning_of_a_file_is_complete(part: str) -> None:
    for beginning in prefixes(getattr(WHOLE, part)):
        cut = replace(WHOLE, **{part: beginning})
        assert cut.missing_part() is not None, beginning[-200:]


def test_the_report_needs_its_last_empty_lines() -> None:
    for lost in (1, 2, 3):
        assert replace(WHOLE, report=WHOLE.report[:-lost]).missing_part() == "the memory report"


def test_files_of_two_dumps_do_not_match() -> None:
    larger = WHOLE.report.replace("1024", "2048")
    assert replace(WHOLE, report=larger).missing_part() == "the memory report"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, name in NAMES.items():
        (tmp_path / name).write_text(getattr(WHOLE, part))
    return tmp_path


def test_a_complete_dump_is_taken_without_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "UNKNOWN_FORMAT_SECONDS", 10**9)
    copies = copy_dump(folder, os.getpid())
    assert (copies / NAMES["report"]).read_text() == WHOLE.report


@pytest.mark.parametrize("part", NAMES)
def test_a_cut_file_is_not_taken_however_long_it_stays(folder: Path, part: str) -> None:
    path, text = folder / NAMES[part], getattr(WHOLE, part)
    for lines in range(len(text.splitlines())):
        beginning = "".join(text.splitlines(keepends=True)[:lines])
        if not text[len(beginning) :].strip():
            continue
        path.write_text(beginning)
        os.utime(path, (1, 1))
        with pytest.raises(Unreadable):
            copy_dump(folder, os.getpid())


def test_a_file_that_is_open_is_not_taken(folder: Path) -> None:
    with (folder / NAMES["report"]).open("a"), pytest.raises(Unreadable):
        copy_dump(folder, os.getpid())
    copy_dump(folder, os.getpid())


def test_a_dump_of_unknown_form_must_be_quiet(folder: Path) -> None:
    (folder / NAMES["values"]).unlink()
    for name in NAMES.values():
        if (folder / name).exists():
            os.utime(folder / name, (1, 1))
    copy_dump(folder, os.getpid())
    late = time.time() + 10**6
    os.utime(folder / NAMES["program"], (late, late))
    with pytest.raises(Unreadable):
        copy_dump(folder, os.getpid())
    copy_dump(folder, os.getpid(), ended=True)
