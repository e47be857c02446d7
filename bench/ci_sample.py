"""Choose the tests that CI runs, from recorded seconds. List all others in tests/outside_ci.tsv.

    FORERUN_LONG_TESTS=1 .ci/run   # records the seconds of every test in .cache/seconds-3.X.json
    python bench/ci_sample.py      # reads these files; or: python bench/ci_sample.py OLDEST.json NEWEST.json

Each Python has a budget in seconds of one worker. CI keeps, until the budget is used: the tests of `KEEP`, short
tests, the cheapest test of each file, the cheapest case of each function, and then the other tests. Each group starts
with its cheapest test.

A line of the list is a test, or a function of which all cases are omitted. A line with a third column is for one
Python only. A new test is in no line, so CI runs it. A test with the marker `slow` in its source has no line either.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "outside_ci.tsv"
HEADER = "# Seconds and name of each test that CI omits. Written by `python bench/ci_sample.py`.\n"
RECORDED = [ROOT / ".cache" / f"seconds-{python}.json" for python in ("3.11", "3.13")]
OLDEST_BUDGET_SECONDS = 2700.0
NEWEST_BUDGET_SECONDS = 360.0
MAX_SHORT_SECONDS = 0.5
MAX_SECONDS_FOR_A_FILE = 30.0

# One sample of each capability. A function stands for its cheapest case.
KEEP = (
    "tests/aot/test_gpu_plan.py::test_a_small_job_fits_one_gpu",
    "tests/aot/test_plan.py::test_small_job_with_its_ledger",
    "tests/cloud/test_commands_on_fake.py::test_down_deletes_one_run_and_leaves_the_other",
    "tests/cloud/test_controller_on_fake.py::test_a_preempted_run_continues_in_another_zone_and_its_figure_equals_the_bill",
    "tests/contract/test_context.py::test_loss_and_gradients_are_those_of_one_device",
    "tests/contract/test_expert_adapters.py::test_peft_computes_the_logits_of_the_run",
    "tests/contract/test_families.py::test_a_step_on_eight_devices",
    "tests/contract/test_families.py::test_gradients_of_the_mean_loss[qwen3]",
    "tests/contract/test_families.py::test_gradients_of_the_mean_loss[qwen3-moe]",
    "tests/contract/test_families.py::test_gradients_of_the_mean_loss[qwen3.5-moe]",
    "tests/contract/test_program_hashes.py::test_programs_of_a_few_examples_are_the_recorded_ones",
    "tests/contract/test_quantized_experts.py::test_losses_and_gradients_are_those_of_the_dequantized_base",
    "tests/contract/test_recipes.py::test_trained_and_resumed[lora]",
    "tests/contract/test_round_trip.py::test_bit_for_bit",
    "tests/docs/test_code_blocks.py::test_every_block_of_a_page_runs[tutorials/quickstart.md]",
    "tests/e2e/test_quickstart.py::test_init",
    "tests/e2e/test_quickstart.py::test_plan",
    "tests/e2e/test_quickstart.py::test_the_example_of_the_page_on_training",
    "tests/e2e/test_resume.py::test_killed_and_resumed_is_equal_to_the_last_bit",
    "tests/faults/test_checkpoint_kill.py::test_killed_at_random_moments_of_saving",
    "tests/unit/program/test_eight_bit_step.py::test_losses_are_those_of_one_device",
    "tests/unit/program/test_expert_axis.py::test_steps_with_the_expert_axis_are_those_of_one_device[fsdp]",
    "tests/unit/program/test_slices.py::test_losses_and_weights_are_those_of_one_slice",
    "tests/unit/run/test_slices_run.py::test_a_run_on_two_slices_is_that_on_one",
)

Seconds = dict[str, float]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("[")[0]


def shared_fixtures(tests: Iterable[str]) -> dict[str, set[str]]:
    """Return the fixtures of each test that other tests of its file use, too."""
    arguments: dict[str, set[str]] = {}
    shared: set[str] = set()
    for file in {ROOT / file_of(test) for test in tests} | {*(ROOT / "tests").rglob("conftest.py")}:
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                arguments[f"{file.relative_to(ROOT)}::{node.name}"] = {argument.arg for argument in node.args.args}
                if any("scope=" in ast.unparse(decorator) for decorator in node.decorator_list):
                    shared.add(node.name)
    return {test: {f"{file_of(test)}::{name}" for name in arguments[function_of(test)] & shared} for test in tests}


def choose(seconds: Seconds, budget: float) -> Seconds:
    """Return the tests that CI keeps, with the seconds that each adds.

    The recorded seconds of the first test with a fixture contain its setup. The setup is estimated as the difference
    to the cheapest other test with the fixture. The first test that is kept pays for it.
    """
    fixtures = shared_fixtures(seconds)
    users: defaultdict[str, list[str]] = defaultdict(list)  # in the order in which the tests ran
    for test in seconds:
        for fixture in fixtures[test]:
            users[fixture].append(test)
    setups = {
        name: max(0.0, seconds[first] - min((seconds[other] for other in others), default=seconds[first]))
        for name, (first, *others) in users.items()
    }
    ready = {name: False for name in setups}

    def setup(names: Iterable[str]) -> float:
        return max((setups[name] for name in names), default=0.0)

    own = {test: seconds[test] - setup(name for name in fixtures[test] if users[name][0] == test) for test in seconds}

    def cost(test: str) -> float:
        return own[test] + setup(name for name in fixtures[test] if not ready[name])

    seen: set[str] = set()
    groups: list[list[str]] = [[], [], [], [], []]
    for test in sorted(seconds, key=lambda test: (cost(test), test)):
        file, function = file_of(test), function_of(test)
        reasons = (
            test in KEEP or (function in KEEP and function not in seen),
            cost(test) <= MAX_SHORT_SECONDS,
            file not in seen and cost(test) <= MAX_SECONDS_FOR_A_FILE,
            function not in seen,
            True,
        )
        groups[reasons.index(True)].append(test)
        seen |= {file, function}
    kept: Seconds = {}
    for group in groups:
        for test in sorted(group, key=lambda test: (cost(test), test)):
            if sum(kept.values()) + cost(test) <= budget:
                kept[test] = cost(test)
                ready |= dict.fromkeys(fixtures[test], True)
    return kept


def lines_of(seconds: Seconds, kept: Seconds) -> Seconds:
    """Return the omitted tests with their seconds. One line replaces the cases of a function without a kept case."""
    functions = {function_of(test) for test in kept}
    lines: defaultdict[str, float] = defaultdict(float)
    for test in seconds.keys() - kept.keys():
        function = function_of(test)
        lines[test if function in functions else function] += seconds[test]
    return lines


def main(words: list[str]) -> None:
    oldest, newest = (json.loads(Path(file).read_text("utf-8")) for file in words or RECORDED)
    tests = oldest.keys() | newest.keys()
    names = tests | {function_of(test) for test in tests}
    if missing := set(KEEP) - names:
        sys.exit(f"KEEP names tests without recorded seconds: {', '.join(sorted(missing))}")
    listed = {line.split("\t")[1] for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#")}
    if len(listed & names) < len(listed) / 2:
        sys.exit("Most tests of the list have no recorded seconds: run FORERUN_LONG_TESTS=1 .ci/run first.")
    kept = choose(oldest, OLDEST_BUDGET_SECONDS)
    candidates = {test: seconds for test, seconds in newest.items() if test in kept or test not in oldest}
    kept_newest = choose(candidates, NEWEST_BUDGET_SECONDS)
    for python, recorded, chosen in (("3.11", oldest, kept), ("3.13", newest, kept_newest)):
        all_seconds, seconds = sum(recorded.values()), sum(chosen.values())
        print(f"{python}: CI keeps {len(chosen)} tests with {seconds:.0f} s", end=" ")
        print(f"and omits {len(recorded) - len(chosen)} tests with {all_seconds - seconds:.0f} s")
    rows = {test: (f"{seconds:.1f}", test) for test, seconds in lines_of(oldest, kept).items()}
    for test, seconds in lines_of(candidates, kept_newest).items():
        rows.setdefault(test, (f"{seconds:.1f}", test, "py313"))
    LIST.write_text(HEADER + "".join("\t".join(rows[test]) + "\n" for test in sorted(rows)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
