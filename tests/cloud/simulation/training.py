"""The training of one attempt: steps, and checkpoints in the bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.cloud.host.training import ServiceState, TrainProgress
from forerun.exit_codes import STOPPED
from simulation.bucket import Bucket
from simulation.events import World

CHECKPOINTS = "checkpoints/"
RESTART_SECONDS = 5.0  # RestartSec= of the unit of the training


@dataclass(frozen=True)
class Job:
    steps: int
    step_seconds: float
    save_every: int
    save_seconds: float
    fails_at: int | None = None  # the step at which it ends with exit code 1

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds + (self.steps // self.save_every + 1) * self.save_seconds


class Training:
    """The training processes of all hosts of a slice, which start and end together.

    Attributes:
      stop_asked_at: when it was asked to stop with a checkpoint.
    """

    def __init__(
        self, world: World, bucket: Bucket, job: Job, attempt: int, on_write: Callable[[Training, int, str], None]
    ) -> None:
        self.world, self.bucket, self.job, self.attempt = world, bucket, job, attempt
        self.on_write = on_write
        self.state = "idle"
        self.code: int | None = None
        self.stop_asked_at: float | None = None
        self._step, self._since, self._generation = 0, 0.0, 0
        self._saved_once = False

    @property
    def is_active(self) -> bool:
        return self.state in ("running", "saving")

    @property
    def step(self) -> int:
        if self.state != "running":
            return self._step
        return min(self._step + int((self.world.now - self._since) / self.job.step_seconds), self.job.steps)

    def service(self) -> ServiceState:
        return ServiceState(is_active=self.is_active, exit_code=self.code)

    def progress(self) -> TrainProgress:
        save_seconds = self.job.save_seconds if self._saved_once else None
        return TrainProgress(self.step if self.state != "idle" else None, save_seconds)

    def start(self) -> None:
        """Start from the newest checkpoint."""
        if self.state not in ("idle", "crashed") or self.stop_asked_at is not None:
            return
        steps = [int(name.removeprefix(CHECKPOINTS)) for name in self.bucket.contents if name.startswith(CHECKPOINTS)]
        self._step, self.code = max(steps, default=0), None
        self.world.note(f"attempt {self.attempt} trains from step {self._step}")
        self._run()

    def stop(self) -> None:
        """Ask it to save a checkpoint and to end."""
        if self.stop_asked_at is None:
            self.stop_asked_at = self.world.now
            if self.state == "running":
                self._save(STOPPED)

    def crash(self, *, restarts: bool = True) -> None:
        """Kill the processes. systemd starts them again."""
        if self.is_active:
            self._step, self.state, self._generation = self.step, "crashed", self._generation + 1
            if restarts:
                self.world.after(RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if self.state == "crashed":
            self.start()

    def die(self) -> None:
        """End with the machine."""
        self._step, self.state, self._generation = self.step, "dead", self._generation + 1

    def _run(self) -> None:
        self.state, self._since = "running", self.world.now
        self._generation += 1
        generation = self._generation
        until = min((self._step // self.job.save_every + 1) * self.job.save_every, self.job.steps)
        if self.job.fails_at is not None and self._step <= self.job.fails_at < until:
            seconds = (self.job.fails_at - self._step) * self.job.step_seconds
            self.world.after(seconds, lambda: self._fail() if generation == self._generation else None)
            return
        seconds = (until - self._step) * self.job.step_seconds
        self.world.after(seconds, lambda: self._save(None, until) if generation == self._generation else None)

    def _fail(self) -> None:
        self._step, self.state, self.code = self.step, "ended", 1

    def _save(self, code: int | None, step: int | None = None) -> None:
        self._step = self.step if step is None else step
        self.state = "saving"
        self._generation += 1
        generation, saved_step = self._generation, self._step
        self.on_write(self, saved_step, "begin")
        self.world.after(
            self.job.save_seconds, lambda: self._saved(saved_step, code) if generation == self._generation else None
        )

    def _saved(self, step: int, code: int | None) -> None:
        self._saved_once = True
        self.bucket.contents.setdefault(f"{CHECKPOINTS}{step:06}", f"{self.attempt} {step}".encode())
        self.on_write(self, step, "end")
        if step >= self.job.steps:
            code = 0
        elif self.stop_asked_at is not None:
            code = STOPPED
        if code is None:
            self._run()
        else:
            self.state, self.code = "ended", code
            self.world.note(f"attempt {self.attempt}: training ends at step {step} with exit code {code}")
