"""The order of the system calls that make a checkpoint survive a loss of power, observed with strace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from needs import need

CALLS = "openat,fsync,fdatasync,link,linkat,rename,renameat,renameat2,unlink,unlinkat,mkdir,rmdir"
SAVER = """
import os, sys
import jax.numpy as jnp
from forerun.checkpoint.store import CheckpointStore
folder = sys.argv[1]
with CheckpointStore(folder + "/checkpoints", keep=1) as store:
    for step in (1, 2):
        store.save(step, {"w": jnp.ones((64, 64)), "step": jnp.int32(step)}, {"step": step})
        store.wait()
        os.mkdir(f"{folder}/saved-{step}")
        if step == 1:
            os.system(f"cp -r '{folder}/checkpoints' '{folder}/copy'")
"""


@dataclass(frozen=True)
class Call:
    """A system call that succeeded: the numbers of the lines on which it began and ended."""

    name: str
    text: str
    began: int
    ended: int


def calls_in(log: Path) -> list[Call]:
    found: list[Call] = []
    open_calls: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(log.read_text("utf-8", errors="replace").splitlines()):
        thread, _, text = line.partition(" ")
        text = text.strip()
        began = number
        if text.endswith("<unfinished ...>"):
            open_calls[thread] = number, text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            began, start = open_calls.pop(thread)
            text = start + resumed[1]
        if (call := re.match(r"(\w+)\(", text)) and re.search(r"\) += \d", text):
            found.append(Call(call[1], text, began, number))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """(folder, system calls) of a process that saves steps 1 and 2 and keeps one; `copy` is the folder after step 1."""
    need(shutil.which("strace"), "strace")
    folder = tmp_path_factory.mktemp("sync").resolve()
    tracer = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "500", "-o", str(folder / "calls"), "-e", f"trace={CALLS}"]
    ran = subprocess.run(
        [*tracer, sys.executable, "-c", SAVER, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return folder, calls_in(folder / "calls")


def syncs(calls: list[Call], path: Path) -> list[Call]:
    return [call for call in calls if call.name == "fsync" and f"<{path}>" in call.text]


def only(calls: list[Call], name: str, *words: str) -> Call:
    (call,) = [call for call in calls if call.name == name and all(word in call.text for word in words)]
    return call


@pytest.mark.parametrize("number", [1, 2, 3], ids=["claim", "commit 1", "commit 2"])
def test_a_record_is_on_the_disk_before_it_has_its_name(saved: tuple[Path, list[Call]], number: int) -> None:
    folder, calls = saved
    record = folder / "checkpoints" / "commits" / f"{number:012d}.json"
    link = only(calls, "link", f'"{record}"')
    part = re.findall(r'"([^"]+)"', link.text)[0]
    assert part.startswith(str(record))
    assert [call for call in syncs(calls, Path(part)) if call.ended < link.began], "link before fsync of the content"


@pytest.mark.parametrize("step", [1, 2])
def test_the_name_of_a_record_is_on_the_disk_before_the_save_ends(saved: tuple[Path, list[Call]], step: int) -> None:
    folder, calls = saved
    commits = folder / "checkpoints" / "commits"
    link = only(calls, "link", f'"{commits}/{step + 1:012d}.json"')
    end = only(calls, "mkdir", f'"{folder}/saved-{step}"')
    assert [call for call in syncs(calls, commits) if link.ended < call.began and call.ended < end.began]


def test_all_files_are_on_the_disk_before_the_record_exists(saved: tuple[Path, list[Call]]) -> None:
    folder, calls = saved
    link = only(calls, "link", "/commits/000000000002.json")
    copy, top = folder / "copy" / "1-1-1", folder / "checkpoints" / "1-1-1"
    # Orbax writes under a temporary name: only a sync after the last renaming makes the final names last.
    renamed = [call for call in calls if call.name.startswith("rename") and str(top) in call.text]
    last = max(call.ended for call in renamed if call.began < link.began)
    paths = [top / path.relative_to(copy) for path in (copy, *copy.rglob("*"))]
    assert len([path for path in copy.rglob("*") if path.is_file()]) >= 4
    missing = [
        str(path)
        for path in (*paths, folder / "checkpoints")
        if not [call for call in syncs(calls, path) if last < call.began and call.ended < link.began]
    ]
    assert missing == []


def test_a_record_is_gone_from_the_disk_before_its_files_are_removed(saved: tuple[Path, list[Call]]) -> None:
    folder, calls = saved
    commits, top = folder / "checkpoints" / "commits", folder / "checkpoints" / "1-1-1"
    gone = only(calls, "unlink", f'"{commits}/000000000002.json"')
    inside = [call for call in calls if call.name in ("unlinkat", "rmdir") and f"{top}" in call.text]
    first = min(call.began for call in inside if call.began > gone.ended)
    assert not [call for call in inside if call.began < gone.began and f"{top}>" in call.text]
    assert [call for call in syncs(calls, commits) if gone.ended < call.began and call.ended < first]
