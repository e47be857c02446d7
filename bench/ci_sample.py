"""Choose the tests that CI runs, by capability and by recorded seconds. List all others in tests/outside_ci.tsv.

    FORERUN_LONG_TESTS=1 .ci/run   # records the seconds of every test in .cache/seconds-3.X.json
    python bench/ci_sample.py      # reads these files; or: python bench/ci_sample.py OLDEST.json NEWEST.json

CI keeps the cheapest test of each capability of tests/support/ci_capabilities.py, and the tests of `KEEP`. Each Python
has a budget in seconds of one worker. Until it is used, CI also keeps short tests, the cheapest test of each file, the
cheapest case of each function, and then the other tests. Each group starts with its cheapest test.

A line of the list is a test, or a function of which all cases are omitted. A line with a third column is for one
Python only. A new test is in no line, so CI runs it. A test with the marker `slow` in its source has no line either.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))
from ci_capabilities import LIST, capabilities, file_of, function_of  # noqa: E402

HEADER = "# Seconds and name of each test that CI omits. Written by `python bench/ci_sample.py`.\n"
RECORDED = [ROOT / ".cache" / f"seconds-{python}.json" for python in ("3.11", "3.13")]
OLDEST_BUDGET_SECONDS = 2400.0
NEWEST_BUDGET_SECONDS = 400.0
MAX_SHORT_SECONDS = 0.5
MAX_SECONDS_FOR_A_FILE = 45.0

# Tests of capabilities that no table lists. A function stands for its cheapest case.
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
    "tests/docs/test_code_blocks.py::test_every_block_of_a_page_runs[how-to/python.md]",
    "tests/docs/test_code_blocks.py::test_every_block_of_a_page_runs[tutorials/quickstart.md]",
    # Later cases read the run of this one.
    "tests/e2e/test_code_beside_a_job.py::test_no_command_imports_from_the_working_directory_or_the_jobs_folder[train]",
    "tests/e2e/test_notebooks.py::test_quickstart",
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

# Shared fixtures that take little time, although the first test that uses one is long.
QUICK_FIXTURES = {"bench", "inputs", "job_file", "shell", "site", "start"}

Seconds = dict[str, float]


@cache
def functions_for(file: str) -> dict[str, tuple[set[str], bool]]:
    """Return the arguments of each function that a test file sees, and whether it is a fixture that tests share."""
    functions: dict[str, tuple[set[str], bool]] = {}
    for path in (*(ROOT / "tests").rglob("conftest.py"), ROOT / file):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                shared = any("scope=" in ast.unparse(decorator) for decorator in node.decorator_list)
                functions[node.name] = ({argument.arg for argument in node.args.args}, shared)
    return functions


def shared_fixtures(test: str) -> set[str]:
    """Return the fixtures of a test that other tests of its file use, too."""
    functions, found = functions_for(file_of(test)), set[str]()
    waiting = [function_of(test).rpartition("::")[2]]
    while waiting:
        arguments = functions[waiting.pop()][0] & functions.keys()
        waiting += arguments - found
        found |= arguments
    return {f"{file_of(test)}::{name}" for name in found - QUICK_FIXTURES if functions[name][1]}


def choose(seconds: Seconds, budget: float) -> Seconds:
    """Return the tests that CI keeps, with the seconds that each adds. Those of capabilities may exceed the budget.

    The recorded seconds of the first test with a fixture contain its setup. The setup is estimated as the difference
    to the cheapest other test with the fixture. The first test that is kept pays for it.
    """
    fixtures = {test: shared_fixtures(test) for test in seconds}
    users: defaultdict[str, list[str]] = defaultdict(list)  # in the order in which the tests ran
    for test in seconds:
        for name in fixtures[test]:
            users[name].append(test)
    own, setups = dict(seconds), {}
    for name, (first, *others) in users.items():
        setups[name] = max(0.0, seconds[first] - min(seconds[test] for test in others or [first]))
        own[first] = min(own[first], seconds[first] - setups[name])

    def cost(test: str) -> tuple[float, str]:
        return own[test] + max((setups[name] for name in fixtures[test]), default=0.0), test

    by_cost = sorted(seconds, key=cost)
    required = {
        next((test for test in by_cost if not {test, function_of(test)}.isdisjoint(tests)), "")
        for tests in capabilities().values()
    }
    seen: set[str] = set()
    groups: list[list[str]] = [[], [], [], [], []]
    for test in by_cost:
        file, function = file_of(test), function_of(test)
        reasons = (
            test in required or test in KEEP or (function in KEEP and function not in seen),
            cost(test)[0] <= MAX_SHORT_SECONDS,
            file not in seen and cost(test)[0] <= MAX_SECONDS_FOR_A_FILE,
            function not in seen,
            True,
        )
        groups[reasons.index(True)].append(test)
        seen |= {file, function}
    kept: Seconds = {}
    for number, group in enumerate(groups):
        for test in sorted(group, key=cost):
            added, _ = cost(test)
            if number == 0 or sum(kept.values()) + added <= budget:
                kept[test] = added
                setups |= dict.fromkeys(fixtures[test], 0.0)
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
    names = {*oldest, *newest, *map(function_of, oldest), *map(function_of, newest)}
    listed = {line.split("\t")[1] for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#")}
    if missing := set(KEEP) - names:
        sys.exit(f"KEEP names tests without recorded seconds: {', '.join(sorted(missing))}")
    if len(listed & names) < len(listed) / 2:
        sys.exit("Most tests of the list have no recorded seconds: run FORERUN_LONG_TESTS=1 .ci/run first.")
    kept = choose(oldest, OLDEST_BUDGET_SECONDS)
    candidates = {test: seconds for test, seconds in newest.items() if test in kept or test not in oldest}
    kept_newest = choose(candidates, NEWEST_BUDGET_SECONDS)
    for python, recorded, chosen in (("3.11", oldest, kept), ("3.13", newest, kept_newest)):
        total, used = sum(recorded.values()), sum(chosen.values())
        print(f"{python}: CI keeps {len(chosen)} tests with {used:.0f} s", end=" ")
        print(f"and omits {len(recorded) - len(chosen)} tests with {total - used:.0f} s")
    rows = {test: f"{seconds:.1f}\t{test}\n" for test, seconds in lines_of(oldest, kept).items()}
    for test, seconds in lines_of(candidates, kept_newest).items():
        rows.setdefault(test, f"{seconds:.1f}\t{test}\tpy313\n")
    LIST.write_text(HEADER + "".join(rows[test] for test in sorted(rows)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
