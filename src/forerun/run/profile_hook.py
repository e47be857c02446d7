"""The hook that records a range of steps with the JAX profiler, in the folders that TensorBoard's plugin reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import jax

from forerun.files import atomic_write
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.run.device_profile import ProfileSummary, device_profiles, summary_of
from forerun.run.hooks import Hook, RunSession
from forerun.run.step_range import StepRange
from forerun.run.throughput import Throughput
from forerun.run_folder.run_folder import RunFolder
from forerun.supervise.worker import Worker

SUMMARY = "profile.txt"
# Level 1 has only steps and operations of the devices. On CPU, operations are host events of level 2.
HOST_LEVEL, HOST_LEVEL_ON_CPU = 1, 2
PLUGIN = Path("plugins") / "profile"


class Recording:
    """One recording at a time: `start`, then `next_step` before each step, then `stop`. Main thread only.

    Args:
      folder: where to write. Each recording gets its own subfolder, named after its time.
      on_cpu: whether the program runs on CPU devices.
    """

    def __init__(self, folder: Path, *, on_cpu: bool) -> None:
        self.folder, self._on_cpu = folder, on_cpu
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._is_active = False

    @property
    def is_active(self) -> bool:
        return self._is_active

    def start(self) -> None:
        """Start to record. No step must be in flight."""
        options = jax.profiler.ProfileOptions()
        # Python calls would make the trace large and the steps slow.
        options.python_tracer_level = 0
        options.host_tracer_level = HOST_LEVEL_ON_CPU if self._on_cpu else HOST_LEVEL
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._is_active = True

    def next_step(self, step: int | None) -> None:
        """Mark the begin of a step, and the end of the one before it. None: only the end."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = None if step is None else jax.profiler.StepTraceAnnotation("train", step_num=step)
        if self._annotation is not None:
            self._annotation.__enter__()

    def stop(self) -> Path:
        """Stop, write the files, and return their folder. All recorded steps must have ended."""
        before = self._sessions()
        self.next_step(None)
        self._is_active = False
        jax.profiler.stop_trace()
        new = self._sessions() - before
        return max(new, key=lambda path: path.name) if new else self.folder

    def discard(self) -> None:
        """Stop after a failure. The files may be incomplete, and no error hides that of the run."""
        if self._is_active:
            with suppress(Exception):
                self.stop()

    def _sessions(self) -> set[Path]:
        return set((self.folder / PLUGIN).glob("*"))


class ProfileHook(Hook):
    """Records the steps of a range. It is the first hook of a run.

    It stops in `on_step`, before an evaluation or a save of the same step, and starts in `after_step`, after them. The
    loop waits for all steps in flight before both, so that the trace has exactly the steps of the range.

    A profile that cannot be written is a warning: it must not end the run.

    Args:
      steps: the steps to record.
      recording: the recording to use.
      on_saved: receives the range that was recorded, and the folder with the files.
      stopping: a context for the end of the recording, which can take minutes.
      reporter: receives messages about a recording that fails or ends early.
    """

    def __init__(
        self,
        steps: StepRange,
        recording: Recording,
        *,
        on_saved: Callable[[StepRange, Path], None],
        stopping: Callable[[], AbstractContextManager[None]],
        reporter: Reporter,
    ) -> None:
        self._steps, self._recording = steps, recording
        self._on_saved, self._stopping, self._reporter = on_saved, stopping, reporter

    def on_start(self, step: int, state: State) -> None:
        if self._steps.first == step + 1:
            jax.block_until_ready(state)
            self._begin()

    def is_due(self, step: int) -> bool:
        return step == self._steps.first - 1 or (step == self._steps.last and self._recording.is_active)

    def on_step(self, step: int, state: State) -> None:
        if step == self._steps.last and self._recording.is_active:
            self._end(step, state)

    def after_step(self, step: int) -> None:
        if self._recording.is_active:
            self._recording.next_step(step + 1)
        elif step == self._steps.first - 1:
            self._begin()

    def on_stop(self, step: int, state: State) -> None:
        if self._recording.is_active:
            self._reporter.warn(
                f"the run stops after step {step}, so the profile does not reach step {self._steps.last}"
            )
            self._end(step, state)
        elif step < self._steps.first:
            self._reporter.warn(
                f"the run stops after step {step}, so nothing is profiled: --profile asked for {self._steps}"
            )

    def _begin(self) -> None:
        try:
            self._recording.start()
        except (OSError, RuntimeError) as error:
            self._reporter.warn(f"the profile cannot be recorded: {error}")
            return
        self._recording.next_step(self._steps.first)

    def _end(self, step: int, state: State) -> None:
        with self._stopping():
            try:
                jax.block_until_ready(state)  # metrics may arrive before the rest of a step
                self._on_saved(StepRange(self._steps.first, step), self._recording.stop())
            except (OSError, RuntimeError, ValueError) as error:
                self._reporter.warn(f"the profile cannot be written: {error}")


@contextmanager
def profiling(
    session: RunSession, steps: StepRange | None, folder: RunFolder, throughput: Throughput
) -> Iterator[list[Hook]]:
    """Yield the hook that profiles `steps`, or no hook if there are none. Stop the recording if the block fails."""
    if steps is None:
        yield []
        return
    recording = Recording(folder.profile, on_cpu=jax.default_backend() == "cpu")

    def on_saved(recorded: StepRange, recording_folder: Path) -> None:
        _, text = summary_of_session(recording_folder, recorded)
        atomic_write(folder.profile / SUMMARY, text)
        session.reporter.info(text.rstrip())
        relative = recording_folder.relative_to(folder.path).as_posix()
        session.times.event("profile", first=recorded.first, last=recorded.last, folder=relative)

    @contextmanager
    def stopping() -> Iterator[None]:
        session.worker.pulse.phase("profile")
        with session.times.spent("other"):
            yield
        throughput.exclude()

    try:
        yield [ProfileHook(steps, recording, on_saved=on_saved, stopping=stopping, reporter=session.reporter)]
    finally:
        recording.discard()


def summary_of_session(session: Path, steps: StepRange) -> tuple[ProfileSummary | None, str]:
    """Return the summary of a recording, and its text. None if the recording has no operations of a device."""
    # Each host that writes to the folder has a file.
    profiles = [profile for file in sorted(session.glob("*.xplane.pb")) for profile in device_profiles(file)]
    summary = summary_of(profiles, steps.count) if profiles else None
    title = f"profile of {steps}"
    text = summary.text(title) if summary else f"{title}: the recording has no operations of a device\n"
    return summary, f"{text}\n  trace: {session}\n"


def still_ahead(steps: StepRange, step: int, last: int, worker: Worker, reporter: Reporter) -> StepRange | None:
    """Return the range if a run that has reached `step` can still record it, else None.

    A supervised run continues without a profile: after a restart, the range may be in the past.

    Raises:
      UserError: the run is not supervised, and has already reached the range.
    """
    if step < steps.first:
        return steps
    error = steps.passed_error(step, last)
    if worker.attempt == 0:  # without a supervisor
        raise error
    reporter.warn(f"{error.what}: nothing is profiled")
    return None
