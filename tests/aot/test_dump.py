"""Dumps of the real compilers: complete as they are, and incomplete wherever a file is cut."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler, dump
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot

MODEL: dict[str, Any] = {"layers": 2, "embed": 128, "heads": 2, "kv_heads": 1, "mlp": 256, "vocab": 512}
JOB = Job.model_validate({"model": MODEL, "data": "text", "sequence": 256, "batch": 8, "steps": 10})
CUTS = 200  # of each file: evenly, and its last lines


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[dump.DumpTexts]:
    """The dumps that the compiles of this test take."""
    found: list[dump.DumpTexts] = []

    class Kept(dump.DumpTexts):
        def missing_part(self) -> str | None:
            missing = super().missing_part()
            if missing is None:
                found.append(self)
            return missing

    monkeypatch.setattr(dump, "DumpTexts", Kept)
    monkeypatch.setattr(dump, "UNKNOWN_FORMAT_SECONDS", 10**9)  # only complete dumps are taken
    return found


@pytest.mark.parametrize("machine", ["v5e-8", "h100-1"])
def test_every_cut_is_seen(texts: list[dump.DumpTexts], machine: str) -> None:
    question = CompileRequest(ResolvedJob(JOB), slice_named(machine))
    answer = compiler.ask(question, threading.Event(), lambda phase: None)
    assert answer.fits
    whole = texts[-1]
    for part in (field.name for field in fields(whole)):
        lines = getattr(whole, part).splitlines(keepends=True)
        cuts = {*range(0, len(lines), max(1, len(lines) // CUTS)), *range(max(0, len(lines) - 20), len(lines))}
        for cut in cuts:
            if "".join(lines[cut:]).strip():
                text = "".join(lines[:cut])
                assert dump.DumpTexts.missing_part(replace(whole, **{part: text})) is not None, (part, cut)
