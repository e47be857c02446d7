"""`.ci/tests` runs a failed test again only if it is marked `timing`, and accepts it after two passes in a row.

Each case is a small test suite in a folder. Its tests take their results from files, one result for each run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "tests"
SUITE = """\
import os
from pathlib import Path

import pytest


def take(name):
    file = Path(__file__).with_name(name)
    result, _, rest = file.read_text().partition(" ")
    file.write_text(rest)
    with Path(__file__).with_name("runs").open("a") as runs:
        runs.write(f"{name} {os.getpid()} {os.environ.get('PYTEST_XDIST_WORKER')}\\n")
    if result == "skip":
        pytest.skip("not here")
    if result == "crash":
        os._exit(3)
    assert result == "pass", f"{name} has failed as planned"


"""
MARKED = """\
@pytest.mark.timing
def test_{name}():
    take("{name}")
"""
SETUP = """\
@pytest.fixture
def {name}():
    take("{name}")


@pytest.mark.timing
def test_{name}({name}):
    pass
"""
UNMARKED = """\
def test_{name}():
    take("{name}")
"""
TESTS = {"marked": MARKED, "setup": SETUP, "unmarked": UNMARKED}


class Run:
    """One run of `.ci/tests`: its exit code, what it printed, and the processes that ran each test."""

    def __init__(self, folder: Path, *words: str, **results: str) -> None:
        """Write a suite with one test for each keyword; its results are separated by spaces. Run the suite."""
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = timing\n  slow\naddopts = --strict-markers\n")
        tests = [TESTS[name.partition("_")[0]].format(name=name) for name in results]
        (folder / "test_suite.py").write_text("\n\n".join([SUITE, *tests]))
        for name, result in results.items():
            (folder / name).write_text(result)
        plugins = ["-p", "xdist"] if words else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of the start of a pytest process
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *plugins, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.code, self.out = done.returncode, done.stdout
        runs = (folder / "runs").read_text().splitlines() if (folder / "runs").exists() else []
        self.runs = [tuple(line.split()) for line in runs]

    def count(self, name: str) -> int:
        """Return how often this test ran."""
        return sum(run[0] == name for run in self.runs)

    @property
    def last_line(self) -> str:
        return self.out.splitlines()[-1]

    @property
    def flaky(self) -> list[tuple[str, str]]:
        """Return the node ids listed at the end, each with the line about its first failure."""
        _, found, listed = self.out.partition("== FLAKY")
        return re.findall(r"^   (test_suite\.py\S+)\n      (line \d+: .+)$", listed, re.M) if found else []


def test_a_run_without_failures_prints_counts_and_slowest_tests(tmp_path: Path) -> None:
    run = Run(tmp_path, marked="pass", unmarked="pass", unmarked_2="skip")
    assert (run.code, run.last_line) == (0, "2 passed, 0 failed, 1 skipped")
    assert "slowest 20 durations" in run.out
    assert len(run.runs) == 3


def test_the_seconds_of_tests_outside_the_slow_marker_are_written(tmp_path: Path) -> None:
    """Those of a listed test are recorded, too: tests/conftest.py marks it as slow and adds a keyword."""
    hook = "def pytest_itemcollected(item):\n    if 'slow' in item.name:\n        item.add_marker('slow')\n"
    (tmp_path / "conftest.py").write_text(
        f"{hook}    if 'listed' in item.name:\n        item.keywords['outside_ci'] = True\n"
    )
    Run(tmp_path, unmarked="pass", unmarked_2="skip", unmarked_slow="pass", unmarked_slow_listed="pass")
    (file,) = (tmp_path / ".cache").glob("seconds-3.*.json")
    seconds = json.loads(file.read_text())
    assert seconds.keys() == {"test_suite.py::test_unmarked", "test_suite.py::test_unmarked_slow_listed"}
    assert all(0 <= value < 60 for value in seconds.values())


@pytest.mark.parametrize("words", [(), ("-n", "2")])
def test_a_marked_test_that_passes_twice_is_accepted_and_listed(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = Run(tmp_path, *words, marked="fail pass pass", unmarked="pass")
    assert (run.code, run.last_line) == (0, "2 passed, 0 failed")
    [(name, reason)] = run.flaky
    assert name == "test_suite.py::test_marked"
    assert reason.endswith("AssertionError: marked has failed as planned")
    assert run.count("unmarked") == 1
    _, *alone = [one for one in run.runs if one[0] == "marked"]
    assert len({process for _, process, _ in alone}) == 2, "each run again is a process of its own"
    assert {worker for *_, worker in alone} == {"None"}, "without workers beside it"


@pytest.mark.parametrize(("results", "count"), [("fail pass fail", 3), ("fail fail", 2), ("fail pass skip", 3)])
def test_a_marked_test_that_does_not_pass_twice_fails_the_run(tmp_path: Path, results: str, count: int) -> None:
    run = Run(tmp_path, marked=results, unmarked="pass")
    assert (run.code, run.last_line, run.flaky) == (1, "1 passed, 1 failed", [])
    assert run.count("marked") == count


def test_an_unmarked_failure_fails_the_run_and_nothing_runs_again(tmp_path: Path) -> None:
    run = Run(tmp_path, marked="fail pass pass", unmarked="fail pass pass")
    assert (run.code, run.last_line, run.flaky) == (1, "0 passed, 2 failed", [])
    assert (run.count("marked"), run.count("unmarked")) == (1, 1)


def test_a_marked_test_whose_setup_fails_runs_again(tmp_path: Path) -> None:
    run = Run(tmp_path, setup="fail pass pass")
    assert (run.code, run.last_line) == (0, "1 passed, 0 failed")
    assert [name for name, _ in run.flaky] == ["test_suite.py::test_setup"]


def test_more_than_five_failures_are_no_chance(tmp_path: Path) -> None:
    run = Run(tmp_path, **{f"marked_{n}": "fail pass pass" for n in range(6)})
    assert (run.code, run.last_line, run.flaky) == (1, "0 passed, 6 failed", [])
    assert len(run.runs) == 6


def test_a_crashed_worker_fails_the_run(tmp_path: Path) -> None:
    """The test is marked, but no test of ours may end its own process."""
    run = Run(tmp_path, "-n", "1", marked="crash pass pass")
    assert (run.code, run.last_line, run.flaky) == (1, "0 passed, 1 failed", [])
    assert run.count("marked") == 1


def test_an_error_of_collection_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    assert Run(tmp_path, marked="pass").code == pytest.ExitCode.INTERRUPTED
