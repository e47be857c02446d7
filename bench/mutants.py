"""Mutants: whether the tests of a package notice a wrong line in it.

Each row of `mutants.toml` replaces one text of a source file by a plausible mistake. The tests of the package must then
fail. Everything runs in a copy of the repository, so the working tree never changes. `results/mutants.jsonl` has one
line for each mutant. A mutant runs again if its row, its source file or one of its test files has changed; support
files and other modules are not compared, so use `--all` before a release.

A mutant that survives needs a test, unless the row says why it is `equivalent`: no input gives another result.
Needs sshd and the packages of `scripts/dev --torch`, as some of the tests do.

Usage: python bench/mutants.py [--only NAME ...] [--all] [--jobs N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path("bench", "mutants.toml")
RECORD = Path("bench", "results", "mutants.jsonl")
SOURCE = Path("src", "forerun")
KILLED, SURVIVED, TIMEOUT, STALE = "killed", "survived", "timeout", "stale"
TARGET = 0.95  # share of the mutants without `equivalent` that must be killed
SHORTEST_TIMEOUT_SECONDS = 300.0
TIMEOUT_FACTOR = 5.0  # times the time of the unchanged tests
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
SKIPPED = re.compile(r"(\d+) skipped")


@dataclass(frozen=True)
class Mutant:
    """A row of the table. `file` is below `src/forerun`, and `tests` are below `tests`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""  # why no test can notice it

    def mutated(self, text: str) -> str | None:
        """Return the changed source, or None if the original text does not occur exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None

    def digest(self, root: Path) -> str:
        """Return a hash of the change, the source file and the test files."""
        digest = hashlib.sha256(json.dumps([self.file, self.old, self.new, self.tests]).encode())
        paths = [root / SOURCE / self.file, *(root / "tests" / path for path in self.tests)]
        for path in paths:
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TestRun:
    """The result of a test process. `failed` is the first test that failed; `exit_code` is None after a timeout."""

    exit_code: int | None
    failed: str
    skipped: int
    output: str
    seconds: float


class Record:
    """The recorded results by mutant, one line each in the order of the table."""

    def __init__(self, names: Sequence[str], file: Path) -> None:
        self.file, self._names, self._lock = file, list(names), threading.Lock()
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        self.rows = {row["name"]: row for row in map(json.loads, lines)}

    def add(self, row: dict[str, object]) -> None:
        """Write a result at once, so that an interrupted run loses nothing."""
        with self._lock:
            self.rows[str(row["name"])] = row
            lines = [json.dumps(self.rows[name]) + "\n" for name in self._names if name in self.rows]
            new_file = self.file.with_suffix(".part")
            new_file.write_text("".join(lines), "utf-8")
            new_file.replace(self.file)


def read_table(file: Path) -> list[Mutant]:
    rows = tomllib.loads(file.read_text("utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


@contextmanager
def repository_copy(root: Path) -> Iterator[Path]:
    """Yield a temporary copy of all files of a repository that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        require_own_source(copy)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return the environment of a test process: its forerun is that of the copy, before an editable installation."""
    return {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONHASHSEED": "0"}


def require_own_source(copy: Path) -> None:
    command = [sys.executable, "-c", "import forerun; print(forerun.__file__)"]
    printed = subprocess.run(command, cwd=copy, env=environment(copy), check=True, capture_output=True, text=True)
    if not Path(printed.stdout.strip()).resolve().is_relative_to(copy):
        raise SystemExit(f"the tests would import {printed.stdout.strip()}, which is not in the copy {copy}")


def run_tests(copy: Path, tests: Sequence[str], timeout_seconds: float | None = None) -> TestRun:
    """Run tests in a copy until the first failure."""
    # Results that forerun or pytest stored may come from other mutants. Compiled programs have their source as a key.
    for folder in (copy / ".cache").glob("*"):
        if folder.name not in ("jax", "pyc"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE", "--tb=line"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, *(f"tests/{path}" for path in tests)],
        cwd=copy, env=environment(copy), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, code = process.communicate(timeout=timeout_seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, code = process.communicate()[0], None
    failed, skipped = FAILURE.search(output), SKIPPED.search(output)
    return TestRun(
        code,
        failed[1] if failed else "",
        int(skipped[1]) if skipped else 0,
        output,
        time.monotonic() - began,
    )


def result_of(copy: Path, number: int, mutant: Mutant, baseline: TestRun) -> dict[str, object]:
    """Return the recorded row of a mutant."""
    row: dict[str, object] = {"name": mutant.name, "file": mutant.file, "digest": mutant.digest(copy)}
    path = copy / SOURCE / mutant.file
    original, times = path.read_text("utf-8"), path.stat()
    changed = mutant.mutated(original)
    if changed is None:
        return {**row, "result": STALE}
    path.write_text(changed, "utf-8")
    # Python compares seconds and size: without another time, it could use the compiled original.
    os.utime(path, (times.st_atime, 1e9 + number))
    try:
        run = run_tests(copy, mutant.tests, max(SHORTEST_TIMEOUT_SECONDS, TIMEOUT_FACTOR * baseline.seconds))
    finally:
        path.write_text(original, "utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if run.exit_code not in (None, 0, 1, 2):  # pytest's codes of failed tests and of an import that failed
        raise SystemExit(f"{mutant.name}: pytest ended with {run.exit_code}\n{run.output[-2000:]}")
    result = TIMEOUT if run.exit_code is None else SURVIVED if run.exit_code == 0 else KILLED
    row |= {"result": result, "test": run.failed, "seconds": round(run.seconds)}
    row |= {"baseline_seconds": round(baseline.seconds), "skipped": baseline.skipped}
    return row | {"python": sys.version.split()[0]}


class Progress:
    """Lines for each finished mutant, with the time that is left."""

    def __init__(self, count: int) -> None:
        self._count, self._done, self._began, self._lock = count, 0, time.monotonic(), threading.Lock()

    def add(self, row: dict[str, object]) -> None:
        with self._lock:
            self._done += 1
            minutes_left = (time.monotonic() - self._began) / self._done * (self._count - self._done) / 60
            seconds = f" in {row['seconds']} s" if "seconds" in row else ""
            test = f" by {row['test']}" if row.get("test") else ""
            result = f"[{self._done}/{self._count}] {row['name']}: {row['result']}{seconds}{test}"
            print(f"{result}  about {minutes_left:.0f} min left", flush=True)


def run_pending(root: Path, pending: Sequence[tuple[int, Mutant]], record: Record, jobs: int) -> None:
    """Run mutants that have the same tests one after the other in one copy, after the unchanged tests."""
    groups: dict[tuple[str, ...], list[tuple[int, Mutant]]] = defaultdict(list)
    for number, mutant in pending:
        groups[mutant.tests].append((number, mutant))
    progress, copies = Progress(len(pending)), queue.SimpleQueue[Path]()

    def run_group(tests: tuple[str, ...]) -> None:
        copy = copies.get()
        try:
            baseline = run_tests(copy, tests)
            if baseline.exit_code != 0:
                raise SystemExit(f"unchanged tests fail: {' '.join(tests)}\n{baseline.output[-4000:]}")
            skipped = f", {baseline.skipped} skipped" if baseline.skipped else ""
            print(f"unchanged: {' '.join(tests)}: {baseline.seconds:.0f} s{skipped}", flush=True)
            for number, mutant in groups[tests]:
                row = result_of(copy, number, mutant, baseline)
                record.add(row)
                progress.add(row)
        finally:
            copies.put(copy)

    with repository_copies(root, jobs) as folders, ThreadPoolExecutor(jobs) as pool:
        for folder in folders:
            copies.put(folder)
        for group_run in [pool.submit(run_group, tests) for tests in groups]:
            group_run.result()


@contextmanager
def repository_copies(root: Path, count: int) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(repository_copy(root)) for _ in range(count)]


def summary(root: Path, mutants: Sequence[Mutant], record: Record) -> int:
    """Print the result of all mutants, and return the exit code."""
    rows = [record.rows.get(mutant.name, {}) for mutant in mutants]
    outdated = [
        mutant.name for mutant, row in zip(mutants, rows, strict=True) if row.get("digest") != mutant.digest(root)
    ]
    real = [row for mutant, row in zip(mutants, rows, strict=True) if not mutant.equivalent]
    killed = [row for row in real if row.get("result") == KILLED]
    equivalent = len(mutants) - len(real)
    print(f"{len(killed)} of {len(real)} mutants are killed ({len(killed) / len(real):.0%}); {equivalent} equivalent")
    for row in real:
        if row and row["result"] != KILLED:
            print(f"{row['result']}: {row['name']} ({row['file']})")
    for mutant, row in zip(mutants, rows, strict=True):
        if mutant.equivalent and row.get("result") == KILLED:
            print(f"not equivalent: {mutant.name} is killed by {row['test']}")
    if outdated:
        print(f"not run since a change: {', '.join(outdated)}")
    is_complete = not outdated and all(row["result"] != STALE for row in rows)
    return 0 if is_complete and len(killed) >= TARGET * len(real) else 1


def main(options: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants, also if they have a result")
    parser.add_argument("--all", action="store_true", help="run all mutants, also those that have a result")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time (default: 1)")
    arguments = parser.parse_args(options)
    mutants = read_table(root / TABLE)
    record = Record([mutant.name for mutant in mutants], root / RECORD)
    if unknown := set(arguments.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    pending = [
        (number, mutant)
        for number, mutant in enumerate(mutants)
        if (arguments.only is None or mutant.name in arguments.only)
        and (arguments.only or arguments.all or record.rows.get(mutant.name, {}).get("digest") != mutant.digest(root))
    ]
    if pending:
        print(f"{len(pending)} of {len(mutants)} mutants", flush=True)
        run_pending(root, pending, record, min(arguments.jobs, len(pending)))
    return summary(root, mutants, record)


if __name__ == "__main__":
    sys.exit(main())
