"""What CI must cover: each capability with the tests that prove it, and whether CI runs a test.

The capabilities are the rows of docs/reference/features.yaml, of the tables of families and of multimodal checkpoints,
and of the fault matrix. `bench/ci_sample.py` keeps one test of each, and tests/unit/test_ci_capabilities.py checks it.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
LIST = TESTS / "outside_ci.tsv"
FAMILY_TEST = "tests/contract/test_families.py::test_logits"
# The faults of the matrix by the test in CI that injects the same fault, or the nearest one that takes seconds instead
# of minutes. The matrix itself is a command with a recorded result: tests/faults/matrix.py.
FAULT_TESTS: dict[str, tuple[str, ...]] = {
    "e2e/test_resume.py::test_killed_and_resumed_is_equal_to_the_last_bit": ("sigkill",),
    "e2e/test_resume.py::test_asked_to_stop_it_saves_and_goes_on_to_the_last_bit": ("sigterm",),
    "e2e/test_resume.py::test_supervised_a_killed_run_starts_again_by_itself": ("storm",),
    "e2e/test_resume.py::test_resumed_on_half_the_devices": ("mesh", "hosts resize"),
    "faults/test_interrupts.py::test_a_compilation_is_not_waited_for": ("interrupt",),
    "unit/run/test_validation.py::test_a_stop_inside_a_look_does_not_lose_it": ("looks",),
    "unit/run/test_compile_step.py::test_cache_hit_and_miss_are_told_apart": ("restart",),
    "unit/supervise/test_run_lock.py::test_train_is_rejected_before_it_reads_anything": ("reject",),
    "unit/checkpoint/test_store.py::test_an_owner_that_was_replaced_cannot_commit": ("second",),
    "unit/checkpoint/test_store.py::test_an_owner_replaced_while_its_save_is_under_way": ("late",),
    "faults/test_checkpoint_damage.py::test_fifty_damages_are_found_told_and_passed_over": ("damage",),
    "faults/test_checkpoint_kill.py::test_killed_at_random_moments_of_saving": ("kill in saves",),
    "faults/test_checkpoint_kill.py::test_killed_at_the_system_calls_that_make_a_checkpoint_count": ("system calls",),
    "faults/test_checkpoint_disk.py::test_full_at_every_phase_of_a_save": ("failing calls", "storage disk-full"),
    "unit/run/test_compile_cache.py::test_damaged_and_foreign_entries_are_never_used": ("cache",),
    "faults/test_hosts_faults.py::test_a_killed_worker_is_noticed_at_once_and_all_start_again[2]": ("hosts kill",),
    "faults/test_hosts_faults.py::test_a_killed_worker_is_noticed_at_once_and_all_start_again[0]": (
        "hosts kill-coordinator",
    ),
    "faults/test_hosts_faults.py::test_a_worker_dies_with_its_supervisor_and_the_others_wait_for_it": (
        "hosts kill-host",
    ),
    "faults/test_hosts_faults.py::test_a_stopped_worker_is_found_and_named": ("hosts stop",),
    "faults/test_hosts_faults.py::test_sigterm_to_one_stops_all_at_one_step_and_the_run_goes_on_later": (
        "hosts sigterm",
    ),
    "faults/test_hosts_faults.py::test_the_leader_may_die_and_come_back": ("hosts kill-leader",),
    "faults/test_hosts_faults.py::test_a_host_that_freezes_is_lost_and_wakes_up_too_late": (
        "hosts freeze-host",
        "partition",
    ),
    "faults/test_hosts_faults.py::test_a_disk_that_fails_for_a_while_is_waited_for": ("storage disk-eio",),
    "faults/test_hosts_jax.py::test_a_host_that_sleeps_inside_a_step_is_named_by_its_stack": ("hosts sleep",),
    "faults/test_hosts_jax.py::test_only_the_leader_listens_on_the_cluster_address_and_all_stop_at_one_step": ("scan",),
    "unit/run/test_replicas.py::test_a_run_stops_before_it_saves_what_is_damaged_and_goes_on_from_what_is_whole": (
        "flip",
    ),
    "unit/run/test_run_guard.py::test_a_passing_fault_leaves_no_trace": ("numbers",),
    "faults/test_storage_faults.py::test_a_bucket_that_loses_answers_resets_uploads_refuses_and_hangs": tuple(
        f"storage bucket-{kind}" for kind in ("flaky", "refuse", "close", "hang", "slow", "reset", "lost", "kill")
    ),
    "faults/test_storage_faults.py::test_the_lock_of_a_tpu": ("storage lock-dead", "storage lock-live"),
    "unit/data/reads/test_block_reader.py::test_wrong_answers_are_repeated_and_counted": ("data faults",),
    "unit/data/reads/test_block_cache.py::test_a_removed_cache_is_created_again": ("data deleted",),
    "faults/test_bucket_data.py::test_a_unit_that_is_damaged_in_the_bucket_is_rejected_by_name": (
        "data clean",
        "data damaged",
    ),
    "unit/track/test_forwarder.py::test_every_row_once_and_in_order_though_the_server_fails": (
        "storage tracker-500",
        "storage tracker-hang",
        "storage tracker-close-later",
    ),
    "unit/track/test_goodput.py::test_clock_that_goes_backwards_stands_still": (
        "storage clock-restarts",
        "storage clock-run",
    ),
}
for folder in ("contract", "support"):  # families_reference and the modules that it imports
    sys.path.append(str(TESTS / folder))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("[")[0]


def capabilities() -> dict[str, list[str]]:
    """Return the tests of each capability. A test without brackets stands for any of its cases."""
    return {**features(), **families(), **faults()}


def features() -> dict[str, list[str]]:
    rows = yaml.safe_load((ROOT / "docs" / "reference" / "features.yaml").read_text("utf-8"))
    return {f"feature {id}": row["tests"] for id, row in rows.items() if "tests" in row}


def families() -> dict[str, list[str]]:
    from families_reference import VARIANTS

    tests: dict[str, list[str]] = {}
    for name, variant in VARIANTS.items():
        tests.setdefault(f"family {variant.row}", []).append(f"{FAMILY_TEST}[{name}]")
    return tests


def faults() -> dict[str, list[str]]:
    return {f"fault {fault}": [f"tests/{test}"] for test, faults in FAULT_TESTS.items() for fault in faults}


@cache
def omitted() -> frozenset[str]:
    """Return the tests and functions that CI omits on the oldest Python, which runs the complete selection."""
    rows = (line.split("\t") for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#"))
    return frozenset(row[1] for row in rows if len(row) == 2)


@cache
def slow_functions(file: str) -> frozenset[str]:
    """Return the functions of a test file whose marker `slow` is in the source, without importing the file.

    Raises:
      KeyError: the file has no such test function, in `runs_in_ci`.
    """
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    marks = [
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any("pytest.mark.slow" in ast.unparse(mark) for mark in marks):
        return frozenset(function.name for function in functions)
    return frozenset(
        function.name
        for function in functions
        if "pytest.mark.slow" in {ast.unparse(decorator) for decorator in function.decorator_list}
    )


def runs_in_ci(test: str) -> bool:
    """Return whether CI runs the test, or at least one case of a function.

    A function with omitted cases has one that CI keeps: `bench/ci_sample.py` writes one line for a function otherwise.
    """
    is_slow = function_of(test).rpartition("::")[2] in slow_functions(file_of(test))
    return not is_slow and omitted().isdisjoint((test, function_of(test)))
