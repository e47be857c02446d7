"""Kill a saving process, at random moments or at every system call of a save, or let system calls fail, and see that
nothing committed is lost.

    python tests/faults/checkpoint_kill.py random 200       # about three minutes
    python tests/faults/checkpoint_kill.py syscalls         # about four minutes; needs strace
    python tests/faults/checkpoint_kill.py errors           # about two minutes; needs strace

Prints one JSON line per kill and a summary. The savers are forked from one process that has imported everything and
run nothing, so that a trial takes less than a second; what they find is checked in a fork too.

A saver begins by restoring what is there: it must be a step that was begun, at least the last that was told to be
committed, equal to the last bit, and no checkpoint may be damaged. It then saves one step after the other.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# jax writes there as it goes: what is killed would leave half an entry.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax
import jax.numpy as jnp
import numpy as np
from rig import attached_strace
from runs import states

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore, SaveFailed

CALLS = ("openat", "mkdir", "write", "pwrite64", "pwritev", "writev", "ftruncate", "fsync", "fdatasync", "close")
CALLS += ("rename", "link", "unlink", "unlinkat", "rmdir")
FAILING = {"mkdir": 3, "writev": 3, "fsync": 12, "rename": 1, "link": 1, "unlink": 2, "unlinkat": 4}
MAX_POINTS = 400
SECONDS = 300


def state_of(step: int) -> dict[str, Any]:
    numbers = np.random.default_rng(step)
    arrays = {f"w{i}": jnp.asarray(numbers.standard_normal((64, 1024), np.float32)) for i in range(4)}
    return {**arrays, "step": jnp.int32(step)}


def like() -> dict[str, Any]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def restored_step(folder: Path) -> int:
    """The newest step, proven bit for bit; 0 if there is none."""
    found = Reader(folder).restore_newest(like())
    if found is None:
        return 0
    assert found.skipped == (), found.skipped
    pairs = zip(jax.tree.leaves(found.state), jax.tree.leaves(state_of(found.step)), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs), "restored bits differ"
    return found.step


def leftovers(folder: Path) -> list[str]:
    """What no record names, once a new owner has opened the folder."""
    named = {commit.folder for commit in Reader(folder).log.commits()}
    parts = [path.name for path in (folder / "commits").iterdir() if path.suffix != ".json"]
    return [path.name for path in folder.iterdir() if path.name not in {*named, "commits"}] + parts


class Forked:
    """A call in a process of its own, which tells lines of JSON and may be told to go on."""

    def __init__(self, call: Callable[[Callable[[Any], None], Callable[[], None]], None]) -> None:
        told, self._tell = os.pipe()
        self._wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(told)
                call(self._say, lambda: assert_read(self._wait))
                os._exit(0)
            except BaseException:
                self._say({"error": traceback.format_exc()})
                os._exit(1)
        os.close(self._tell)
        os.close(self._wait)
        self.lines = os.fdopen(told)
        self.status: int | None = None

    def _say(self, line: Any) -> None:
        os.write(self._tell, json.dumps(line).encode() + b"\n")

    def heard(self) -> Any:
        """The next line, or None if it has ended."""
        line = self.lines.readline()
        answer = json.loads(line) if line.endswith("\n") else None
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    def go_on(self) -> None:
        os.write(self._go, b".")

    def end(self) -> list[Any]:
        """What it told until it ended."""
        rest = list(iter(self.heard, None))
        self.status = os.waitpid(self.pid, 0)[1]
        self.lines.close()
        os.close(self._go)
        return rest


def assert_read(descriptor: int) -> None:
    assert os.read(descriptor, 1) == b"."


def found_in(folder: Path) -> dict[str, Any]:
    """Restored before and after a new owner has opened the folder and saved; looked at in a fork."""

    def look(say: Callable[[Any], None], _: Callable[[], None]) -> None:
        step = restored_step(folder)
        with CheckpointStore(folder, keep=1) as store:
            left = leftovers(folder)
            store.save(step + 1, state_of(step + 1), {})
            store.wait()
        assert restored_step(folder) == step + 1
        say({"restored": step, "leftovers": left or leftovers(folder)})

    (answer,) = Forked(look).end()
    return dict(answer)


def save_for_ever(folder: Path) -> Callable[[Callable[[Any], None], Callable[[], None]], None]:
    def saver(say: Callable[[Any], None], _: Callable[[], None]) -> None:
        step = restored_step(folder)
        with CheckpointStore(folder, keep=2) as store:
            say({"restored": step, "leftovers": leftovers(folder)})
            while True:
                step += 1
                say({"begun": step})
                store.save(step, state_of(step), {"step": step})
                store.wait()
                say({"committed": step})

    return saver


def random_kills(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Some time after a save has begun, at most a little longer than the first ones took: most fall inside of one, and
    of every second it is made sure.

    Every third process is let commit a step before, so that it gets somewhere on a slow machine too.
    """
    chance = random.Random(seed)
    committed, begun, inside, save_seconds = 0, 0, False, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "checkpoints")
        for number in range(count + 1):
            began = time.monotonic()
            saver = Forked(save_for_ever(folder))
            first = saver.heard()
            recovery = time.monotonic() - began
            good = committed <= first["restored"] <= begun and first["leftovers"] == []
            if number:
                yield {
                    "kill": number,
                    "inside": inside,
                    "committed": committed,
                    **first,
                    "good": good,
                    "seconds": recovery,
                }
            lines = [first]
            if number < count:
                began = time.monotonic()
                lines += [saver.heard() for _ in range(5 if number % 3 == 0 else 1)]
                save_seconds = save_seconds or (time.monotonic() - began) / 2
                time.sleep(chance.uniform(0, 1.2 * save_seconds))
                while number % 2 and not stopped_inside(saver.pid, folder):
                    os.kill(saver.pid, signal.SIGCONT)
                    time.sleep(chance.uniform(0, 0.1 * save_seconds))
            os.kill(saver.pid, signal.SIGKILL)
            lines += saver.end()
            begun = max([begun, *(line["begun"] for line in lines if "begun" in line)])
            committed = max([committed, *(line["committed"] for line in lines if "committed" in line)])
            inside = in_a_save(folder)


def in_a_save(folder: Path) -> bool:
    """Of a saver that stands still, or is gone."""
    there = [path.name for path in folder.iterdir()]
    named = {commit.folder for commit in Reader(folder).log.commits()}
    return any(name not in {*named, "commits"} for name in there)


def stopped_inside(pid: int, folder: Path) -> bool:
    """Whether a save is under way, which is known only of a process that stands still, with all its threads."""
    os.kill(pid, signal.SIGSTOP)
    while not (found := states(pid)) <= set("TZX"):
        time.sleep(0.001)
    return in_a_save(folder) or "Z" in found  # dead: it has told why


def saves(folder: Path) -> Callable[[Callable[[Any], None], Callable[[], None]], None]:
    """One save in peace; then, once told, two, of which the second removes what the first left to remove."""

    def saver(say: Callable[[Any], None], wait: Callable[[], None]) -> None:
        with CheckpointStore(folder, keep=1) as store:
            for step in (1, 2, 3):
                store.save(step, state_of(step), {"step": step})
                store.wait()
                say({"committed": step})
                if step == 1:
                    wait()

    return saver


def saves_and_goes_on(folder: Path) -> Callable[[Callable[[Any], None], Callable[[], None]], None]:
    """One save in peace, one in trouble, one in peace."""

    def saver(say: Callable[[Any], None], wait: Callable[[], None]) -> None:
        with CheckpointStore(folder, keep=1) as store:
            store.save(1, state_of(1), {})
            store.wait()
            say({"committed": 1})
            wait()
            try:
                store.save(2, state_of(2), {})
                store.wait()
            except SaveFailed as error:
                say({"told": error.why})
            else:
                say({"told": None})
            wait()
            newest = restored_step(folder)
            left = leftovers(folder)
            store.save(3, state_of(3), {})
            store.wait()
            say({"newest": newest, "leftovers": left, "then": restored_step(folder), "finally": leftovers(folder)})

    return saver


def failed_at(call: str, error: str, when: int, folder: Path) -> dict[str, Any]:
    """Every thread's `when`th such call of a save, and each after it, fails; then all is well again."""
    saver = Forked(saves_and_goes_on(folder))
    assert saver.heard() == {"committed": 1}
    tracer = attached_strace(saver.pid, call, f"error={error}:when={when}+")
    saver.go_on()
    told = saver.heard()
    tracer.terminate()
    tracer.communicate(timeout=SECONDS)
    saver.go_on()
    (found,) = saver.end()
    whole = found["newest"] == (1 if told["told"] else 2) and found["then"] == 3
    return {"call": call, "error": error, "when": when, **told, **found, "good": whole and found["finally"] == []}


def failing_calls(calls: Sequence[str]) -> Iterator[dict[str, Any]]:
    for call in calls:
        for error in ("EIO", "ENOSPC"):
            for when in range(1, FAILING[call] + 1):
                with tempfile.TemporaryDirectory() as name:
                    yield failed_at(call, error, when, Path(name, "checkpoints"))


def killed_at(call: str, when: int, folder: Path) -> dict[str, Any] | None:
    """Killed when a thread enters its `when`th such call after the first save; None if no thread makes so many."""
    saver = Forked(saves(folder))
    assert saver.heard() == {"committed": 1}
    tracer = attached_strace(saver.pid, call, f"signal=SIGKILL:when={when}")
    saver.go_on()
    committed = max([1, *(line["committed"] for line in saver.end())])
    tracer.communicate(timeout=SECONDS)
    if saver.status == 0:
        return None
    assert saver.status is not None
    assert os.WTERMSIG(saver.status) == signal.SIGKILL
    found = found_in(folder)
    good = committed <= found["restored"] <= min(committed + 1, 3) and found["leftovers"] == []
    return {"call": call, "when": when, "committed": committed, **found, "good": good}


def syscall_kills(calls: Sequence[str], every: int = 1) -> Iterator[dict[str, Any]]:
    for call in calls:
        for when in range(1, MAX_POINTS, every):
            with tempfile.TemporaryDirectory() as name:
                result = killed_at(call, when, Path(name, "checkpoints"))
            if result is None:
                break
            yield result


def main() -> int:
    if sys.argv[1] == "random":
        results = random_kills(int(sys.argv[2]))
    else:
        assert shutil.which("strace"), "needs strace"
        calls = tuple(sys.argv[2:])
        results = syscall_kills(calls or CALLS) if sys.argv[1] == "syscalls" else failing_calls(calls or tuple(FAILING))
    all_ = []
    for result in results:
        all_.append(result)
        print(json.dumps(result), flush=True)
    summary: dict[str, Any] = {"kills": len(all_), "survived": sum(result["good"] for result in all_)}
    if sys.argv[1] == "random":
        seconds = sorted(result["seconds"] for result in all_)
        summary |= {"inside_a_save": sum(result["inside"] for result in all_), "worst_seconds": seconds[-1]}
    else:
        summary["points"] = Counter(result["call"] for result in all_)
    print(json.dumps(summary))
    return 0 if summary["kills"] == summary["survived"] else 1


if __name__ == "__main__":
    sys.exit(main())
