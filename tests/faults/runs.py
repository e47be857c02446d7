"""A small real job, `forerun train` on it as a process, and what a run must leave behind to be EXACT.

EXACT: every step's loss bit for bit, the digest of the final state, and the ledger of example ids are those of the run
that nothing happened to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hosts_job import gone

from forerun.checkpoint.log import Commit, Log
from forerun.storage.folder import PART, LocalFolder

ROOT = Path(__file__).resolve().parents[2]
BRAKE = Path(__file__).resolve().parent / "brake"
TEXT = ROOT / "examples" / "quickstart" / "text" / "carroll-alice.txt"
STEPS, EVERY, DEVICES = 100, 5, 2
PATIENCE_SECONDS = 600.0
# XLA would end the process when one device is 40 seconds behind another: on a busy machine, or in one that was stopped.
WAITS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300 --xla_cpu_collective_call_terminate_timeout_seconds=900"
)
JOB = """\
model: {{layers: 2, embed: 192, heads: 4}}
data: {{path: text, ledger: true}}
sequence: 64
batch: 8
steps: {steps}
device: cpu
optimizer: {{lr: 1e-2}}
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
sample: {{tokens: 0}}
"""
RESUMED = re.compile(r"^state .*  step (\d+) from ", re.MULTILINE)
BEGUN = re.compile(r"^state .*  (?:step (\d+) from |random weights)", re.MULTILINE)
NOT_OURS = ("JAX_NUMPY_DTYPE_PROMOTION", "FORERUN_WORKER", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class Outcome:
    """What two runs are compared by."""

    losses: Mapping[int, str]
    state: str
    ledger: str

    def differs_in(self, other: Outcome) -> list[str]:
        mine, theirs = vars(self), vars(other)
        return [name for name in mine if mine[name] != theirs[name]]


class Bench:
    """A folder with a job file, its text, and caches of its own: the first run fills them, the others start warm."""

    def __init__(self, folder: Path, *, steps: int = STEPS, every: int = EVERY, job: str = JOB) -> None:
        self.folder, self.steps, self.every = folder, steps, every
        (folder / "text").mkdir(parents=True)
        shutil.copy(TEXT, folder / "text")
        (folder / "job.yaml").write_text(job.format(steps=steps, every=every))
        environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        self.environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join(map(str, (BRAKE, ROOT / "src"))),
            "FORERUN_TEST_BRAKE": str(folder / "brake"),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache" / "compiled"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "FORERUN_METADATA_URL": "http://127.0.0.1:9",
        }

    def run(self, name: str) -> Run:
        return Run(self, name)

    @contextmanager
    def held_back(self, first: int, last: int, **seconds: float) -> Iterator[None]:
        """Runs, while they make these steps: see `brake/sitecustomize.py`."""
        self.brake(first, last, **seconds)
        try:
            yield
        finally:
            self.release()

    def brake(self, first: int, last: int, **seconds: float) -> None:
        """From here on, instead of what held runs back before: they see the one or the other, and never half of it."""
        part = self.folder / "brake.part"
        part.write_text(json.dumps({"first": first, "last": last, **seconds}))
        part.replace(self.folder / "brake")

    def release(self) -> None:
        (self.folder / "brake").unlink(missing_ok=True)

    def reference(self, *words: str, devices: int = DEVICES) -> Outcome:
        """The run that nothing happens to."""
        with self.run("reference") as run:
            run.start(*words, devices=devices)
            run.finish()
            return run.outcome()


class Run:
    """One run of the job by its name, through all the processes that it may take."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name = bench, name
        self.folder = bench.folder / "runs" / name
        self.checkpoints = self.folder / "checkpoints"
        self.log_file = bench.folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.supervised = False
        self.started = 0.0
        self._from = 0

    def start(
        self, *words: str, devices: int = DEVICES, supervise: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        assert self._process is None or self._process.poll() is not None, "it runs already"
        self.supervised, self._from = supervise, len(self.said())
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {WAITS}"}
        command = [sys.executable, "-m", "forerun", "train", "job.yaml", f"name={self.name}", *words]
        with self.log_file.open("ab") as log:
            self.started = time.time()
            self._process = subprocess.Popen(
                [*command, *(["--supervise"] if supervise else [])],
                cwd=self.bench.folder,
                env={**self.bench.environment, **flags, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the rig is not one more fault
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def said_now(self) -> str:
        """Since the last start by us."""
        return self.said()[self._from :]

    def worker(self) -> int | None:
        """The process that trains; None if there is none at the moment."""
        if not self.supervised:
            return None if self.over else self.process.pid
        found = children(self.process.pid)
        return found[0] if found else None

    def last_step(self) -> int:
        """Of the metrics, 0 if there are none."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0

    def commits(self) -> list[Commit]:
        return Log(LocalFolder(self.checkpoints)).commits()

    def newest(self) -> int:
        """The step of the newest commit, 0 if there is none."""
        return self.commits()[-1].step if (self.checkpoints / "commits").exists() and self.commits() else 0

    def uncommitted(self) -> list[str]:
        """Folders that no record names, and half a record: a save is or was under way."""
        try:
            names = os.listdir(self.checkpoints)
            records = os.listdir(self.checkpoints / "commits")
        except FileNotFoundError:
            return []
        named = {commit.folder for commit in self.commits()}
        parts = [name for name in records if name.endswith(PART)]
        return [name for name in names if name not in {*named, "commits"}] + parts

    def resumed_at(self) -> list[int]:
        """Of every process that came as far as its state, since the last start by us."""
        return [int(step) for step in RESUMED.findall(self.said_now())]

    def resumed_after(self, said: int) -> int | None:
        """Where the first process began that came as far as its state after so many characters; 0 is afresh."""
        found = BEGUN.search(self.said()[said:])
        return int(found[1] or 0) if found else None

    def wait_for(self, come: Callable[[], Any], seconds: float = PATIENCE_SECONDS, every: float = 0.004) -> bool:
        """False if the run was over before."""
        deadline = time.monotonic() + seconds
        while not come():
            if self.over:
                return bool(come())
            assert time.monotonic() < deadline, f"{self.name}: waited for {seconds} s in vain\n{self.said_now()}"
            time.sleep(every)
        return True

    def wait_for_new_step(self, after: int) -> float | None:
        """When it came; None if the run was over before."""
        return time.time() if self.wait_for(lambda: self.last_step() > after) else None

    def kill(self, pid: int | None, number: int = signal.SIGKILL) -> float:
        """The signal, and when; for SIGKILL, returns when the process is gone."""
        if pid is None:
            return time.time()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return time.time()
        now = time.time()
        if number == signal.SIGKILL:
            if pid == self.process.pid:
                self.process.wait(300)
            assert gone(pid, 300), f"{pid} outlived SIGKILL"
        return now

    def stop(self, pid: int) -> None:
        """SIGSTOP, and returns when none of its threads does anything any more, or it is gone."""
        self.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not states(pid) <= set("TZX"):
            assert time.monotonic() < deadline, f"{pid} does not stop"
            time.sleep(0.001)

    def freeze(self) -> int | None:
        """All of it stands still; the process that trains, None if there is none at the moment. The supervisor is the
        first: it would end a worker that does not move, and start another, while somebody looks at what the first did.
        """
        if self.supervised and not self.over:
            self.stop(self.process.pid)
        worker = self.worker()
        if worker is not None:
            self.stop(worker)
        return worker

    def go_on(self) -> None:
        """After `freeze`."""
        self.kill(self.worker(), signal.SIGCONT)
        if not self.over:
            self.kill(self.process.pid, signal.SIGCONT)

    def finish(self, code: int = 0, seconds: float = PATIENCE_SECONDS) -> None:
        assert self.process.wait(seconds) == code, f"{self.name}: code {self.process.returncode}\n{self.said_now()}"

    def losses(self) -> dict[int, str]:
        """Each step's, all its bits: JSON has a double, which holds every float32, in as many digits as it takes."""
        rows = [row for row in self.metrics() if "loss" in row]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "a step is missing or twice"
        return {row["step"]: row["loss"].hex() for row in rows}

    def looks(self) -> dict[int, str]:
        """The losses of the validation, like those of the steps."""
        return {row["step"]: row["validation_loss"].hex() for row in self.metrics() if "validation_loss" in row}

    def metrics(self) -> list[dict[str, Any]]:
        *whole, _torn = (self.folder / "metrics.jsonl").read_bytes().split(b"\n")
        return [json.loads(line) for line in whole]

    def outcome(self) -> Outcome:
        return Outcome(self.losses(), state_digest(self.checkpoints), digest(self.folder / "ledger.jsonl"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()


def children(pid: int) -> list[int]:
    """Started by any of its threads."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in file.read_text().split()]
    return found


def states(pid: int) -> set[str]:
    """Of all its threads: R, S, D, T ..., as proc(5) has them."""
    found = set()
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(file.read_text().rpartition(")")[2].split()[0])
    return found


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def arrays_digest(tree: Any) -> str:
    """Of a pytree of arrays: names, types, shapes and bytes, wherever they lie and however they are cut."""
    import jax
    import numpy as np

    seal = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for name, leaf in sorted((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves):
        array = np.asarray(leaf)
        seal.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return seal.hexdigest()


def state_digest(checkpoints: Path, step: int | None = None) -> str:
    """Of the newest checkpoint, or that of a step, read by bare Orbax onto one device."""
    import jax
    from orbax.checkpoint import v1 as orbax

    commits = [commit for commit in Log(LocalFolder(checkpoints)).commits() if step in (None, commit.step)]
    where = f"{checkpoints.resolve()}/{commits[-1].folder}"
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), orbax.metadata(where).metadata
    )
    return arrays_digest(orbax.load(where, like))
