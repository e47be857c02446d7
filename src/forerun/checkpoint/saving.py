"""The writer, which stores the arrays of a save in its folder.

A save has two phases. `start` runs in the thread that trains, and returns as soon as the next step may reuse the
state's buffers. `write` runs in the background, and returns when the arrays are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.checkpoint.orbax_adapter import forget, orbax_context, release
from forerun.storage.folder import Folder


class Writer:
    """Writes the arrays of one save.

    One host that saves to a bucket writes from a copy of the arrays in its memory, and tries again while the bucket
    does not answer. Each try has its own folder, because threads of an earlier try may still be writing.

    All others write once, directly from the devices. Waiting does not help on a disk, and hosts that save together
    cannot try again one by one: their failed save raises an error, and the supervisors restart the run.

    Args:
      storage: where the checkpoints are stored.
      context: settings of Orbax.
      new_folder: returns the name of a new folder at each call.

    Attributes:
      folder: the folder of the newest try.
      tries: the number of tries that have begun.
    """

    def __init__(self, storage: Folder, context: orbax.Context, new_folder: Callable[[], str]) -> None:
        self._storage, self._context, self._new_folder = storage, context, new_folder
        self.retries = storage.schedule is not None and not hosts.several()
        self.folder, self.tries = new_folder(), 0
        self._copy: Any = None
        self._response: orbax.AsyncResponse[None] | None = None

    def start(self, state: Any) -> None:
        """Start to copy or write a pytree of arrays. Called once, before `write` begins its work."""
        if self.retries:
            self._copy = host_copy(state)
            return
        self.tries = 1
        if hosts.is_first():
            self._storage.require_folders(self.folder)
        self._response = begin_save(self._storage, self._context, self.folder, state)

    def write(self) -> str:
        """Wait until all arrays are stored, and return their folder."""
        if self._response is not None:
            finish_save(self._response)
            return self.folder
        try:
            self._storage.with_retries(self._try)
        finally:
            self._copy = None  # it is as large as the state
        return self.folder

    def _try(self) -> None:
        self.tries += 1
        if self.tries > 1:
            self.folder = self._new_folder()
        self._storage.require_folders(self.folder)
        finish_save(begin_save(self._storage, self._context, self.folder, self._copy))


def begin_save(storage: Folder, context: orbax.Context, folder: str, state: Any) -> orbax.AsyncResponse[None]:
    """Start a save by Orbax. It has copied the state from the devices when this function returns."""
    try:
        with context:
            return orbax.save_async(f"{storage.address}/{folder}", state)
    except BaseException:  # also Ctrl-C
        release_threads()
        raise


def finish_save(response: orbax.AsyncResponse[None]) -> None:
    """Wait until a save by Orbax has ended on all hosts. Raise its error if it failed."""
    try:
        response.result()
    except BaseException:
        release_threads()
        raise
    finally:
        forget(response)


def release_threads() -> None:
    """End the threads of Orbax that wait for the folders of a failed save. They would wait for minutes.

    This does nothing on several hosts, because the signals that end the threads would not reach the other hosts.
    """
    if not hosts.several():
        release()


def host_copy(state: Any) -> Any:
    """Return a copy of the arrays in the host's memory.

    The copy starts before the next step may reuse the devices' buffers. This function does not wait until it ends.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"), may_alias=False)

    return jax.tree.map(copy, state)


def saving_context(storage: Folder) -> orbax.Context:
    """Return the settings of Orbax for saves."""
    context = orbax_context(storage)
    # To cut replicated arrays into slices, one per replica, Orbax would compile programs in the middle of a run.
    context.array.saving.use_replica_parallel = False
    # Compression makes trained weights smaller by only a twelfth, and takes most of a save's time. Without it, the
    # space that a checkpoint needs is known before the run.
    context.array.saving.use_compression = False
    return context
