"""The processes of a sweep, each with a share of the devices."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED, STOPPED
from forerun.hardware.devices import ORDER, ThisMachine
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.track.metrics import read_metrics
from forerun.units import Seconds
from forerun.verbs.sweep.grid import SweepRun
from forerun.verbs.sweep.sweep_file import SweepFile, job_digest

# ---- Devices ----


TPU_PORT = 8476  # the first port of libtpu; each process needs its own
# Chips of a process, as a box of the host's grid of chips. libtpu accepts only these shapes.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


@dataclass(frozen=True)
class DeviceShare:
    """The devices of one process: variables of its environment, and the cores that it may use (None: all)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    text: str = "all devices"


@dataclass(frozen=True)
class HostDevices:
    """The devices of this host: their platform, and their numbers as the platform counts them."""

    platform: str
    numbers: tuple[int, ...]


def host_devices(job: Job, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> HostDevices:
    """Return the devices that the job would use here, without opening them.

    Chips and GPUs are counted by their device files. The variables that hide some of them are respected.
    """
    known = os.environ if environment is None else environment
    machine = ThisMachine(root=root, environment=known)
    order = ORDER if job.device == "auto" else (job.device,) if isinstance(job.device, str) else job.device
    platform = next((name for name in order if machine.absence(name) is None), order[-1])
    if platform == "tpu":
        files = [*(root / "dev").glob("accel[0-9]*")] or [*(root / "dev/vfio").glob("[0-9]*")]
        return HostDevices(platform, _visible(known.get("TPU_VISIBLE_CHIPS"), len(files)))
    if platform == "gpu":
        files = [*(root / "dev").glob("nvidia[0-9]*")]
        return HostDevices(platform, _visible(known.get("CUDA_VISIBLE_DEVICES"), len(files)))
    return HostDevices("cpu", tuple(sorted(os.sched_getaffinity(0))))


def device_shares(devices: HostDevices, parallel: int) -> list[DeviceShare]:
    """Return the shares of `parallel` processes. A single process gets all devices, and an unchanged environment.

    Raises:
      UserError: there are fewer devices than processes, or they cannot be divided.
    """
    if parallel == 1:
        return [DeviceShare()]
    count = len(devices.numbers) // parallel
    if not count:
        noun = {"tpu": "TPU chips", "gpu": "GPUs", "cpu": "CPU cores"}[devices.platform]
        raise UserError(
            "E-COMMAND-062",
            f"--parallel {parallel} is more than the {len(devices.numbers)} {noun} here",
            why="each process of a sweep gets its own devices",
            fix=f"--parallel {max(1, len(devices.numbers))}, or without --parallel one run after the other",
        )
    if devices.platform == "cpu":
        count_text = f"{count} core{'s' if count != 1 else ''}"
        return [DeviceShare({}, cores, count_text) for cores in _parts(devices.numbers, parallel, count)]
    if devices.platform == "gpu":
        return [
            DeviceShare({"CUDA_VISIBLE_DEVICES": _listed(part)}, None, f"GPU {_listed(part)}")
            for part in _parts(devices.numbers, parallel, count)
        ]
    # A power of two is always a box of chips.
    count = max(size for size in _TPU_BOUNDS if size <= count)
    parts = _parts(devices.numbers, parallel, count)
    return [_tpu_share(part, TPU_PORT + number) for number, part in enumerate(parts)]


def _tpu_share(chips: Sequence[int], port: int) -> DeviceShare:
    """Return the environment in which libtpu sees only `chips`, as a slice of one process."""
    environment = {
        "TPU_VISIBLE_CHIPS": _listed(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return DeviceShare(environment, None, f"TPU chip {_listed(chips)}")


def _visible(setting: str | None, count: int) -> tuple[int, ...]:
    """Return the numbers in a variable such as `0,2`, or all numbers if it is not set or has other names."""
    parts = [part.strip() for part in (setting or "").split(",") if part.strip()]
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else tuple(range(count))


def _parts(numbers: Sequence[int], parallel: int, count: int) -> list[tuple[int, ...]]:
    return [tuple(numbers[at * count : (at + 1) * count]) for at in range(parallel)]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


# ---- Processes ----


LOGS = "logs"
PROGRESS_SECONDS = 30.0  # between two lines about the runs that are running
END_SECONDS = 10.0  # for a process to save and end, before it is killed
# The command of a run, before its job and overrides. Tests replace it.
TRAIN_COMMAND = (sys.executable, "-P", "-m", "forerun", "train")
_LOG_TAIL_BYTES = 20_000


class SweepRunner:
    """Trains the runs of a sweep in child processes.

    A process for each run makes runs independent: one that fails or is killed does not affect the others.

    Args:
      path: the job file.
      file: the state of the sweep.
      shares: the devices of the processes. Their number is the number of runs at a time.
      reporter: receives lines for the user.
      stop_on_failure: whether a failed run ends the sweep.
    """

    def __init__(
        self,
        path: Path,
        file: SweepFile,
        shares: Sequence[DeviceShare],
        reporter: Reporter,
        *,
        stop_on_failure: bool = False,
    ) -> None:
        self._path, self._file, self._reporter, self._stop_on_failure = path, file, reporter, stop_on_failure
        self._free = deque(shares)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: queue.Queue[tuple[SweepRun, DeviceShare, float, int]] = queue.Queue()
        self._stopping = False
        self._number, self._total = 0, 0

    def run(self, runs: Sequence[SweepRun], total: int) -> None:
        """Train `runs`, which are the unfinished ones of `total`. Return when no process is left."""
        waiting, self._number, self._total = deque(runs), total - len(runs), total
        try:
            while waiting or self._children:
                while waiting and self._free and not self._stopping:
                    self._start(waiting.popleft(), self._free.popleft())
                if not self._children:
                    return
                try:
                    ended = self._ended.get(timeout=PROGRESS_SECONDS)
                except queue.Empty:
                    self._report_progress(runs)
                    continue
                self._finish(*ended)
        finally:
            self._end_children()

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ask all processes to save and end, and start no others. Any thread and a signal handler may call this."""
        if not self._stopping:
            self._stopping = True
            for child in list(self._children.values()):
                with suppress(OSError):
                    child.send_signal(number)

    def _start(self, run: SweepRun, share: DeviceShare) -> None:
        self._number += 1
        log = self._file.path.parent / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        where = "" if share.text == DeviceShare.text else f" on {share.text}"
        self._reporter.info(f"run {self._number}/{self._total}: {run.label}{where}")
        self._file.update(run, state="running", exit_code=None, job=job_digest(run.job), error="")
        with log.open("ab") as out, _on_cores(share.cores):
            # Its own session: the terminal's Ctrl-C would reach the child a second time, and end it without a save.
            child = subprocess.Popen(
                [*TRAIN_COMMAND, str(self._path), *run.overrides],
                env={**os.environ, **share.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[run.name] = child
        began = time.monotonic()

        def wait() -> None:
            code = child.wait()
            self._ended.put((run, share, time.monotonic() - began, code))

        threading.Thread(target=wait, name=f"sweep {run.name}", daemon=True).start()

    def _finish(self, run: SweepRun, share: DeviceShare, seconds: float, code: int) -> None:
        """Record the end of a process, and report it."""
        del self._children[run.name]
        self._free.append(share)
        seconds += self._file.record(run).seconds
        if code == 0:
            self._file.update(run, state="finished", seconds=seconds, exit_code=0)
            rows = [row for row in read_metrics(self._folder(run).metrics) if row.get("loss") is not None]
            loss = f", loss {rows[-1]['loss']:.4f}" if rows else ""
            self._reporter.info(f"  finished in {Seconds(seconds)}{loss}: {run.label}")
        elif code in (STOPPED, INTERRUPTED, -signal.SIGINT, -signal.SIGTERM) or self._stopping:
            self._file.update(run, state="stopped", seconds=seconds, exit_code=code)
            self._reporter.info(f"  stopped: {run.label}; the same command resumes it")
        else:
            log = self._file.path.parent / LOGS / f"{run.name}.log"
            error = last_error(log)
            self._file.update(run, state="failed", seconds=seconds, exit_code=code, error=error)
            self._reporter.info(f"  FAILED with exit code {code}: {run.label}; {error or 'no message'}; see {log}")
            if self._stop_on_failure:
                self.stop(signal.SIGTERM)

    def _report_progress(self, runs: Sequence[SweepRun]) -> None:
        """Print the newest step of each running process."""
        for run in runs:
            if run.name in self._children:
                rows = read_metrics(self._folder(run).metrics)
                newest = rows[-1] if rows else {}
                loss = f", loss {newest['loss']:.4f}" if newest.get("loss") is not None else ""
                step = f"step {newest['step']}{loss}" if newest else "no step yet"
                self._reporter.info(f"  {run.label}: {step}")

    def _folder(self, run: SweepRun) -> RunFolder:
        return RunFolder(self._file.path.parent / run.name)

    def _end_children(self) -> None:
        """End all processes that are left after an exception such as KeyboardInterrupt."""
        self.stop()
        deadline = time.monotonic() + END_SECONDS
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()


@contextmanager
def _on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Restrict this thread to `cores` inside the block. A process that is started there inherits them."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def last_error(log: Path) -> str:
    """Return the first line of the last error in a log, or its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line for line in lines if line.startswith(("error: ", "this is a bug in forerun"))]
    return (errors[-1] if errors else lines[-1] if lines else "").strip()[:300]
