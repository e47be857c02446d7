"""Why a compiled program is not the planned one."""

from __future__ import annotations

from pathlib import Path

from forerun.report.differences import UNEXPLAINED, ProgramFacts, program_differences, program_of_run

PLANNED = ProgramFacts(
    "aaaaaaaaaaaa", "v6e", 8, "data=1 fsdp=8 tp=1", {"jax": "0.10.2", "python": "3.11"}, {"batch": "32", "seed": "0"}
)


def changed(**facts: object) -> ProgramFacts:
    return ProgramFacts(**{**vars(PLANNED), "program": "bbbbbbbbbbbb", **facts})  # type: ignore[arg-type]


def test_equal_programs_have_no_differences() -> None:
    assert program_differences(PLANNED, PLANNED) == []
    # Another version or device that gives the same program is not a difference.
    assert program_differences(PLANNED, changed(program=PLANNED.program, device="v5e")) == []


def test_each_difference_is_named_once() -> None:
    trained = changed(device="cpu", devices=4, versions={"jax": "0.10.1", "python": "3.11.9"}, job={"batch": "16"})
    reasons = program_differences(PLANNED, trained)
    assert len(reasons) == 5
    for reason, words in zip(
        reasons,
        [("jax", "0.10.1", "0.10.2"), ("cpu", "v6e"), ("4", "8"), ("batch", "16", "32"), ("seed", "0")],
        strict=True,
    ):
        assert all(word in reason for word in words)


def test_unknown_facts_are_not_compared() -> None:
    assert program_differences(PLANNED, ProgramFacts("bbbbbbbbbbbb")) == [UNEXPLAINED]


def test_a_damaged_file_is_no_program(tmp_path: Path) -> None:
    assert program_of_run(tmp_path) is None
    for text in ("{}", "[", "[1]"):
        (tmp_path / "program.json").write_text(text)
        assert program_of_run(tmp_path) is None
