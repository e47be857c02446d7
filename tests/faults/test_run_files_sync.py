"""The order of the system calls that make the files of a run durable, by strace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

HERE = Path(__file__).resolve().parent
CALL = re.compile(r"^\d+\s+(?P<name>\w+)\((?P<arguments>.*)\)\s+= 0")
FSYNC = re.compile(r"\d+<(?P<path>[^>]*)>")
TWO_PATHS = re.compile(r'"(?P<source>[^"]*)".*"(?P<target>[^"]*)"')
COMMIT = re.compile(r"/checkpoints/commits/\d+\.json$")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """(call, path, new path) of every fsync, rename and link that succeeded, in order."""
    need(shutil.which("strace"), "strace")
    folder = tmp_path_factory.mktemp("run").resolve()
    trace = folder / "trace"
    watched = "trace=fsync,fdatasync,rename,renameat,renameat2,link,linkat"
    strace = ["strace", "-f", "-y", "-s", "4096", "--seccomp-bpf", "-e", watched, "-o", str(trace)]
    subprocess.run([*strace, sys.executable, str(HERE / "traced_run.py"), str(folder)], check=True, timeout=600)
    return _calls(trace.read_text(), str(folder / "run"))


def _calls(trace: str, run: str) -> list[tuple[str, str, str]]:
    """Joins calls that strace split because another thread called meanwhile; they count when they end."""
    found, begun = list[tuple[str, str, str]](), dict[str, str]()
    for line in trace.splitlines():
        thread = line.split(maxsplit=1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        if "resumed>" in line:
            line = begun.pop(thread) + line.partition("resumed>")[2]
        if (call := CALL.match(line)) is None:
            continue
        if (two := TWO_PATHS.search(call["arguments"])) is not None:
            found.append((re.sub(r"at2?$", "", call["name"]), two["source"], two["target"]))
        elif (one := FSYNC.match(call["arguments"])) is not None:
            found.append(("fsync", one["path"], ""))
    return [(name, path.removeprefix(run), new.removeprefix(run)) for name, path, new in found if path.startswith(run)]


@pytest.mark.parametrize("name", ["/job.yaml", "/summary.json"])
def test_a_file_is_synced_before_it_gets_its_name_and_the_name_after(
    calls: list[tuple[str, str, str]], name: str
) -> None:
    renames = [place for place, call in enumerate(calls) if call[0] == "rename" and call[2] == name]
    assert renames
    for place in renames:
        part = calls[place][1]
        assert ("fsync", part, "") in calls[:place]
        assert ("fsync", "", "") in calls[place:], "the folder"


def test_journals_are_synced_before_the_checkpoint_that_records_them(calls: list[tuple[str, str, str]]) -> None:
    """A save is committed while later steps run, so the next save may sync before the commit of the one before."""
    for number, commit in enumerate(_commits(calls), 1):
        for journal in ("/metrics.jsonl", "/ledger.jsonl"):
            assert calls[:commit].count(("fsync", journal, "")) >= number


def test_a_skipped_step_is_synced_before_the_checkpoint_after_it(calls: list[tuple[str, str, str]]) -> None:
    _, second = _commits(calls)
    skip = calls.index(("fsync", "/skips.jsonl", ""))
    assert skip < second
    assert ("fsync", "", "") in calls[skip:second], "the folder, which has the new file's name"


def _commits(calls: list[tuple[str, str, str]]) -> list[int]:
    """Where the checkpoints of steps 2 and 4 are committed; the first record is the claim of the run."""
    _claim, *commits = [place for place, call in enumerate(calls) if call[0] == "link" and COMMIT.search(call[2])]
    assert len(commits) == 2
    return commits
