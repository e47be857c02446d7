"""A run's checkpoints in one folder, written by Orbax in the background.

It stands on `orbax.checkpoint.v1`: Orbax announces it as the top level of its 1.0, and it reads what v0 wrote.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint.tree import first_difference
from forerun.errors import UserError

T = TypeVar("T")

_DISK_TROUBLE = ("os_error_code", "Failed writing", "No space left", "Read-only file system", "Permission denied")


class Store:
    """Checkpoints by step, the newest `keep` of them.

    `save` returns as soon as the state is copied; what goes wrong afterwards is raised by the next `save`, `wait`
    or `close`. A checkpoint appears under its step only when it is whole. What an interrupted save left behind is
    removed when the folder is opened again. On several hosts every process makes the same calls.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        _quiet_orbax()
        self.folder = folder.resolve()
        self._saving: tuple[int, orbax.AsyncResponse[bool]] | None = None
        context = orbax.Context()
        # Cutting replicated arrays into slices, one per replica, would compile programs in the middle of a run.
        context.array.saving.use_replica_parallel = False
        self._inner = orbax.training.Checkpointer(
            self.folder,
            context=context,
            preservation_policy=orbax.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Save a pytree of arrays and a record that JSON can hold; waits only for an earlier save."""
        self._settle()
        try:
            response = self._inner.save_async(step, state, force=True, custom_metadata=record)
        except OSError as error:
            raise self._not_saved(step, error) from error
        if response is None:
            raise RuntimeError(f"Orbax did not start the save of step {step}")
        self._saving = step, response

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, ascending; a save under way is not among them."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def newest(self) -> int | None:
        return max(self.steps(), default=None)

    def record(self, step: int) -> dict[str, Any]:
        """What `save` was given as the record of this step."""
        record = self._about(step).custom_metadata
        return dict(record) if isinstance(record, dict) else {}

    def restore(self, step: int, like: T) -> T:
        """The state of `step` as the tree of `like`, whose leaves are `jax.ShapeDtypeStruct`s with shardings."""
        if any(leaf.sharding is None for leaf in jax.tree.leaves(like)):
            raise ValueError("restore needs a sharding on every leaf")
        saved = self._about(step).metadata
        if not jax.tree.leaves(saved):
            raise self._unreadable(step, ValueError("its list of arrays is empty"))
        difference = first_difference(saved, like)
        if difference is not None:
            raise UserError(
                f"the checkpoint of step {step} is of another model or optimizer",
                why=f"{difference.name}: {difference.saved or 'nothing'} in the checkpoint, "
                f"{difference.wanted or 'nothing'} in the job\n{self.folder / str(step)}",
                fix="set the job back to what it was, or give it another name to start afresh",
            )
        try:
            return self._inner.load(step, like)
        except jax.errors.JaxRuntimeError:  # the devices' trouble, not the file's
            raise
        except Exception as error:
            raise self._unreadable(step, error) from error

    def wait(self) -> None:
        """Return when the save under way is on disk."""
        self._settle()

    def close(self) -> None:
        try:
            self._settle()
        finally:
            self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        try:
            response.result()
        except Exception as error:
            self._forget_failure()
            if isinstance(error, OSError) or any(words in str(error) for words in _DISK_TROUBLE):
                raise self._not_saved(step, error) from error
            raise

    def _forget_failure(self) -> None:
        """Orbax reports one failure twice and still lists the step: hear it out and look at the folder again."""
        try:
            self._inner.wait()
        except Exception as again:
            logging.getLogger(__name__).debug("the same failure again: %s", again)
        self._inner.reload()

    def _about(self, step: int) -> Any:
        if step not in self.steps():
            raise UserError(
                f"there is no checkpoint of step {step}",
                why=f"{self.folder} has {', '.join(map(str, self.steps())) or 'none'}",
                fix="take one of these",
            )
        try:
            return self._inner.metadata(step)
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _not_saved(self, step: int, error: Exception) -> UserError:
        newest = self.newest()
        rest = "no earlier one exists" if newest is None else f"step {newest} is whole: the same command resumes there"
        return UserError(
            f"the checkpoint of step {step} was not saved",
            why=_first_line(error),
            fix=f"make room and mend permissions in {self.folder}; {rest}",
        )

    def _unreadable(self, step: int, error: Exception) -> UserError:
        older = max((other for other in self.steps() if other < step), default=None)
        then = "start afresh" if older is None else f"resume from step {older}"
        return UserError(
            f"the checkpoint of step {step} cannot be read",
            why=_first_line(error),
            fix=f"mv {self.folder / str(step)} elsewhere, then the same command will {then}",
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL


def _quiet_orbax() -> None:
    """Orbax tells its errors as exceptions; its log (hundreds of lines for one full disk) is not for the user."""
    logging.getLogger("absl").addFilter(_not_from_orbax)
