"""A recording of the JAX profiler, in the folders that TensorBoard's profile plugin reads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import jax

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


def device_files(session: Path) -> list[Path]:
    """Return the recordings in the folder that `Recording.stop` returned: one for each host that writes there."""
    return sorted(session.glob("*.xplane.pb"))
