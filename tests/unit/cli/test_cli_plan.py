"""What `forerun plan` does around the compiler, which is replaced here by made-up verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.errors import UserError
from forerun.installation import install_command
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import parse
from forerun.planner.memory import MemoryReport
from forerun.planner.time.step_time import StepTime
from forerun.units import GIB, Bytes, Seconds

JOB = "model: qwen3-0.6b\ndata: nothing\nbatch: 32\nsteps: 1000\n"


class Compiler:
    """Remembers what it was asked; slices in `too_small` do not hold the job."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        self.too_small: set[str] = set()

    def answers(self, questions: Sequence[CompileRequest], on_phase: Any, judge: Any) -> list[FitResult]:
        self.rounds.append([question.slice.name for question in questions])
        return [self.verdict(question) for question in questions]

    def verdict(self, question: CompileRequest) -> FitResult:
        fits = question.slice.name not in self.too_small
        memory = MemoryReport(*(Bytes(n * GIB) for n in (5 if fits else 500, 1, 2, 0, 0)))
        step = StepTime(1.0 / question.slice.chips, {"matmul": 1.0 / question.slice.chips}) if fits else None
        ledger = {"weights": Bytes(GIB), "optimizer": Bytes(2 * GIB), "gradients": Bytes(memory.working_bytes)}
        return FitResult(question, memory, fits, Seconds(1), "x", "mesh", 1e14, 1 << 15, ledger, step)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr("forerun.verbs.slice_compiler.answers", made.answers)
    return made


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "tale.yaml"
    file.write_text(JOB)
    return str(file)


TPUS = ["v6e-1", "v5e-1", "v5p-8", "v4-8", "tpu7x-2x2x1"]
GPUS = ["h100-1", "a100-80-1", "4090-1", "l4-1"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages of the compilers that are installed, whatever this machine has."""
    packages = {"libtpu", "jax_cuda13_plugin"}
    found = "forerun.planner.compile.installed_compilers.find_spec"
    monkeypatch.setattr(found, lambda name: name if name in packages else None)
    return packages


def test_without_slices_all_generations_are_compared(
    compiler: Compiler, installed: set[str], job: str, capsys: Any
) -> None:
    compiler.too_small = {"v4-8", "l4-1"}
    assert main(["plan", job, "--json"]) == 0
    first, second = compiler.rounds
    assert first == [*TPUS, *GPUS]
    assert second == ["v4-16", "v6e-4", "v5e-4"]  # an L4 has no NVLink, so only one is compared
    printed = json.loads(capsys.readouterr().out)
    assert {row["slice"] for row in printed["slices"]} == {*first, *second}
    assert {row["slice"] for row in printed["slices"] if row["platform"] == "gpu"} == set(GPUS)


@pytest.mark.parametrize(
    ("missing", "compiled", "extra"), [("jax_cuda13_plugin", TPUS, "plan-gpu"), ("libtpu", GPUS, "plan")]
)
def test_a_platform_without_its_compiler_is_omitted_and_the_report_says_how_to_include_it(
    missing: str, compiled: list[str], extra: str, compiler: Compiler, installed: set[str], job: str, capsys: Any
) -> None:
    installed.remove(missing)
    assert main(["plan", job]) == 0
    assert set(compiler.rounds[0]) - {"v3-8", "v2-8"} == set(compiled)
    text = " ".join(capsys.readouterr().out.split())
    assert f"{'GPUs' if extra == 'plan-gpu' else 'TPUs'} are not compared" in text
    assert install_command(extra) in text


def test_without_any_compiler_the_plan_is_an_error(
    compiler: Compiler, installed: set[str], job: str, capsys: Any
) -> None:
    installed.clear()
    assert main(["plan", job]) == 2
    assert "E-PLAN-004" in capsys.readouterr().err
    assert compiler.rounds == []


@pytest.mark.parametrize(("device", "compiled"), [("tpu", TPUS), ("gpu", GPUS)])
def test_the_device_of_the_job_selects_the_platform(
    device: str, compiled: list[str], compiler: Compiler, installed: set[str], job: str
) -> None:
    assert main(["plan", job, f"device={device}"]) == 0
    assert set(compiler.rounds[0]) - {"v3-8", "v2-8"} == set(compiled)


def test_named_slices_are_compiled_and_no_others(compiler: Compiler, job: str) -> None:
    assert main(["plan", job, "--on", "v5e-8,v6e-1"]) == 0
    assert compiler.rounds == [["v5e-8", "v6e-1"]]


def test_the_budget_decides_on_the_exit_code(compiler: Compiler, job: str, capsys: Any) -> None:
    assert main(["plan", job, "--on", "v6e-1", "--max-usd", "0.01"]) == 2
    output = capsys.readouterr()
    assert "over" in output.out  # the table is printed all the same
    assert "stays below $0.01" in output.err
    assert main(["plan", job, "--on", "v6e-1", "--max-usd", "500"]) == 0


def test_the_provider_of_the_prices_can_be_chosen(compiler: Compiler, job: str, capsys: Any) -> None:
    words = ["plan", job, "--on", "h100-8", "--json"]
    found = []
    for options in ([], ["--provider", "gcp"], ["--provider", "Lambda,gcp"]):
        assert main([*words, *options]) == 0
        (row,) = json.loads(capsys.readouterr().out)["slices"]
        found.append((row["provider"]["on_demand"], row["cost_usd"]["on_demand"] / row["hours"] / 8))
    # From the catalog of 2026-08-22: vast, the machine of Google Cloud in us-east4 with its GPUs, and lambda.
    assert [provider for provider, _ in found] == ["vast", "gcp", "lambda"]
    assert [usd for _, usd in found] == pytest.approx([1.8675, 10.979, 3.99], rel=1e-3)


def test_a_page_is_written_even_if_nothing_fits(compiler: Compiler, job: str, tmp_path: Path) -> None:
    compiler.too_small = {"v5e-8"}
    page = tmp_path / "plan.html"
    assert main(["plan", job, "--on", "v5e-8", "--html", str(page)]) == 2
    assert "does not hold the job" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "{folder}/none/plan.html"], "there is no folder"),
        (["--html", "{folder}"], "is a folder"),
        (["--trace", "{folder}"], "is a folder"),
        (["--trace", "{folder}/none/step.json"], "E-COMMAND-019"),
        (["--trace", "step.json", "--search"], "E-PLAN-025"),
        (["--trace", "step.json", "--on", "v5e-8,v6e-8"], "E-PLAN-024"),
        (["--zone", "us-centra1-b"], "did you mean us-central1-b?"),
        (["--provider", "gcp", "--provider", "lamda"], "E-HARDWARE-021"),
        (["--prices", "{folder}/none.csv"], "cannot be read"),
        (["--max-usd", "-3"], "not an amount of dollars"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(
    options: list[str], message: str, compiler: Compiler, job: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["plan", job, "--on", "v5e-8", *(one.format(folder=tmp_path) for one in options)]) == 2
    assert message in capsys.readouterr().err
    assert compiler.rounds == []


def test_an_impossible_slice_has_a_row_and_the_others_are_planned(compiler: Compiler, job: str, capsys: Any) -> None:
    """Four sequences on eight data-parallel devices: v6e-8 cannot run the job, v6e-1 can."""
    words = ["plan", job, "batch=4", "--on", "v6e-8,v6e-1"]
    assert main(words) == 0
    assert compiler.rounds == [["v6e-1"]]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["v6e-8"] and " no " in line for line in lines)
    assert any("batch=4 does not divide over 8" in line for line in lines)
    assert main([*words, "--json"]) == 0
    rows = {row["slice"]: row for row in json.loads(capsys.readouterr().out)["slices"]}
    assert list(rows["v6e-8"]) == list(rows["v6e-1"])
    assert rows["v6e-1"]["error"] is None
    assert (rows["v6e-8"]["fits"], rows["v6e-8"]["step_seconds"]) == (False, None)
    assert "batch=4" in rows["v6e-8"]["error"]["what"]


def test_slices_that_are_all_impossible_are_an_error(compiler: Compiler, job: str, capsys: Any) -> None:
    assert main(["plan", job, "batch=4", "--on", "v6e-8,v5e-8"]) == 2
    assert compiler.rounds == []
    assert "v6e-8: batch=4" in capsys.readouterr().err


def test_a_slice_on_which_the_program_cannot_be_built_has_a_row(
    monkeypatch: pytest.MonkeyPatch, job: str, capsys: Any, tmp_path: Path
) -> None:
    """The error comes from the compiler's process, such as a kernel that a generation does not have."""
    made = Compiler()

    def judge(question: CompileRequest, *rest: Any) -> FitResult:
        if question.slice.name == "v3-8":
            raise UserError("E-PLAN-999", "v3-8: no such kernel", why="v3 lacks it", fix="attention=xla")
        return made.verdict(question)

    monkeypatch.setattr("forerun.verbs.slice_compiler.cached_fit_result", judge)
    page = tmp_path / "plan.html"
    assert main(["plan", job, "--on", "v3-8,v6e-1", "--json", "--html", str(page)]) == 0
    rows = {row["slice"]: row for row in json.loads(capsys.readouterr().out)["slices"]}
    assert rows["v3-8"]["error"] == {
        "code": "E-PLAN-999",
        "what": "no such kernel",
        "why": "v3 lacks it",
        "fix": "attention=xla",
    }
    assert rows["v6e-1"]["fits"]
    assert "v3-8 cannot run" in page.read_text("utf-8")
    assert main(["plan", job, "--on", "v3-8"]) == 2


def test_trace_of_the_slice(
    compiler: Compiler, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The plan has only figures, as from the cache, so the trace compiles the slice again and keeps the program."""
    part = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"
    text = f"HloModule m\n\nENTRY %main (a: {part}) -> {part} {{\n  %a = {part} parameter(0)\n"
    module = parse(text + f"  ROOT %x = {part} negate(%a)\n}}\n")
    asked: list[str] = []

    def compiled(question: CompileRequest) -> Any:
        asked.append(question.slice.name)
        return SimpleNamespace(module=module)

    monkeypatch.setattr("forerun.verbs.slice_compiler.verdict", compiled)
    file = tmp_path / "step.json"
    assert main(["plan", job, "--on", "v6e-1", "--trace", str(file)]) == 0
    assert asked == ["v6e-1"]
    content = json.loads(file.read_text())
    assert content["metadata"]["slice"] == "v6e-1"
    [step] = [event for event in content["traceEvents"] if event["name"] == "1 (simulated)"]
    assert step["dur"] == 1e6
    capsys.readouterr()
    compiler.too_small = {"v6e-1"}
    monkeypatch.setattr("forerun.planner.report.remedies.verified", lambda *_: [], raising=True)
    assert main(["plan", job, "--on", "v6e-1", "--trace", str(tmp_path / "none.json")]) == 2
    assert not (tmp_path / "none.json").exists()
