"""Reader of a run's checkpoints. It changes nothing in the folder, and parses only verified files.

Reading the arrays while the digests are computed would hide the time of the digests (a seventh of the processor time of
a restore). It is not done, because Orbax writes hundreds of lines to the terminal if it reads damaged files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.checkpoint.log import BrokenRecord, Commit, Log
from forerun.checkpoint.manifest import Damage, damage
from forerun.checkpoint.orbax_adapter import orbax_context, quiet_orbax
from forerun.errors import UserError, first_line
from forerun.reporter import SILENT, Reporter
from forerun.storage.address import Address
from forerun.storage.open_folder import folder_at
from forerun.storage.retries import NONE, RetrySchedule, StorageUnavailable

T = TypeVar("T")

STEP_FOLDER = re.compile(r"(?P<step>\d+)-(?P<fence>\d+)-(?P<attempt>\d+)(\.(orbax-checkpoint-tmp.*|part))?")


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that could not be used, and why."""

    step: int | None  # None: the record is damaged, so the step is unknown
    commit: int
    why: str

    def __str__(self) -> str:
        return f"{f'step {self.step}' if self.step is not None else f'commit {self.commit}'}: {self.why}"


@dataclass(frozen=True)
class RestoredCheckpoint(Generic[T]):
    """A restored state, its commit, and newer checkpoints that were skipped."""

    state: T
    step: int
    commit: int
    record: dict[str, Any]
    skipped: tuple[SkippedCheckpoint, ...]


class Damaged(UserError):
    """The files of a checkpoint differ from its record."""


class Reader:
    """Reads and verifies the checkpoints in a folder.

    Args:
      folder: the folder or bucket of the checkpoints.
      patience: how long to try again if a bucket does not answer. By default it fails immediately, which suits commands
        for which a user waits.
      reporter: receives a line for each failed try.
    """

    def __init__(self, folder: Path | str, patience: RetrySchedule = NONE, reporter: Reporter = SILENT) -> None:
        quiet_orbax()
        # Orbax needs absolute paths.
        address = folder if Address.of(folder).is_remote else Path(folder).resolve()
        self.storage = folder_at(address, patience, reporter)
        self.log = Log(self.storage)

    def identity(self) -> str:
        """Return the random text that identifies the run, also after a change of owner."""
        return self.storage.with_retries(self.log.identity)

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, ascending."""
        return sorted({commit.step for commit in self.commits()})

    def newest(self) -> int | None:
        """Return the step of the newest commit, or None."""
        commits = self.commits()
        return commits[-1].step if commits else None

    def record(self, step: int) -> dict[str, Any]:
        """Return the record that was passed to `save` at this step."""
        return dict(self.commit(step).record)

    def commit(self, step: int) -> Commit:
        """Return the newest commit of this step. Raise UserError if there is none."""
        found = [commit for commit in self.commits() if commit.step == step]
        if not found:
            raise UserError(
                "E-CHECKPOINT-003",
                f"there is no checkpoint of step {step}",
                why=f"{self.storage.address} has {', '.join(map(str, self.steps())) or 'none'}",
                fix="choose one of these steps",
            )
        return found[-1]

    def damage(self, step: int) -> Damage | None:
        """Verify the files of a checkpoint without restoring it. Return the first damage, or None."""
        commit = self.commit(step)
        return damage(self.storage, commit.folder, commit.files)

    def newest_good(self) -> int | None:
        """Return the step of the newest checkpoint that is not damaged.

        If all are damaged, return the newest one, so that reading it reports the damage. None: there is no checkpoint.
        """
        commits = self.commits()
        for commit in reversed(commits):
            if damage(self.storage, commit.folder, commit.files) is None:
                return commit.step
        return commits[-1].step if commits else None

    def restore(self, step: int, like: T, *, part: str | None = None) -> T:
        """Return the state of `step`, on the devices.

        Args:
          step: the step of the checkpoint.
          like: a tree of `jax.ShapeDtypeStruct`s with shardings, whose structure the result has.
          part: the key of a part of the state to restore alone, for example `params`; None: the complete state.

        Raises:
          Damaged: a file differs from the record.
          UserError: there is no such checkpoint, or it belongs to another model.
        """
        return self._restore_commit(self.commit(step), like, part)

    def restore_newest(self, like: T, *, part: str | None = None) -> RestoredCheckpoint[T] | None:
        """Return the newest checkpoint that is not damaged; None if there is no checkpoint.

        Args:
          like: a tree of `jax.ShapeDtypeStruct`s with shardings, whose structure the result has.
          part: the key of a part of the state to restore alone; None: the complete state.

        Raises:
          Damaged: there are checkpoints, and all are damaged.
        """
        skipped: list[SkippedCheckpoint] = []
        for record in reversed(self.storage.with_retries(self.log.records)):
            if isinstance(record, BrokenRecord):
                skipped.append(SkippedCheckpoint(None, record.number, record.why))
            elif isinstance(record, Commit):
                try:
                    state = self._restore_commit(record, like, part)
                except Damaged as error:
                    skipped.append(SkippedCheckpoint(record.step, record.number, error.why))
                    continue
                return RestoredCheckpoint(state, record.step, record.number, dict(record.record), tuple(skipped))
        if skipped:
            raise Damaged(
                "E-CHECKPOINT-004",
                "no checkpoint can be used",
                why="\n".join(map(str, skipped)),
                fix=f"check the disk under {self.storage.address}; to train from the beginning, use --fresh",
            )
        self.require_records()
        return None

    def require_records(self) -> None:
        """Raise UserError if the folder has checkpoints but no records, because these must not be used or removed."""
        self.storage.with_retries(self._require_records)

    def _require_records(self) -> None:
        if self.log.records():
            return
        found = [name for name in self.storage.names() if name.isdigit() or STEP_FOLDER.fullmatch(name)]
        # Read the log again: a run that has just started may have claimed the folder and saved in the meantime.
        if found and not self.log.records():
            raise UserError(
                "E-CHECKPOINT-005",
                f"{self.storage.address} has checkpoints without commit records",
                why=f"{', '.join(found[:5])}: written by a version of forerun without commit records, or commits/ was "
                "removed; without records, forerun cannot verify them",
                fix="restore commits/, or start over with --fresh (the old folder is renamed and kept)",
            )

    def commits(self) -> list[Commit]:
        """Return the commits that can be read, ascending by number."""
        found = self.storage.with_retries(self.log.commits)
        if not found:
            self.require_records()
        return found

    def _restore_commit(self, commit: Commit, like: T, part: str | None) -> T:
        """Verify the files of a commit, compare its tree with `like`, and load its arrays."""
        if any(leaf.sharding is None for leaf in jax.tree.leaves(like)):
            raise ValueError("restore needs a sharding on every leaf")
        with_retries = self.storage.with_retries
        share = hosts.part()
        self._require_good(commit, with_retries(lambda: damage(self.storage, commit.folder, commit.files, share)))
        wanted: Any = like if part is None else {part: like}
        form = in_saved_form(self._saved_tree(commit, wanted, part), wanted)
        context = orbax_context(self.storage)
        context.pytree.loading.partial_load = part is not None

        def load() -> Any:
            with context:
                return orbax.load(f"{self.storage.address}/{commit.folder}", form)

        try:
            state = with_retries(load) if share[1] == 1 else load()  # hosts that load together cannot retry one by one
        except (
            jax.errors.JaxRuntimeError,
            StorageUnavailable,
        ):  # a fault of the devices or the network, not of the files
            raise
        except Exception as error:
            raise UserError(
                "E-CHECKPOINT-006",
                f"the checkpoint of step {commit.step} cannot be read, although its files are unchanged",
                why=first_line(error),
                fix="run the same command again; if it fails again, please report it with this text",
            ) from error
        restored = in_job_form(state, wanted)
        return cast(T, restored if part is None else restored[part])

    def _require_good(self, commit: Commit, found: Damage | None) -> None:
        if hosts.true_on_all(found is None):
            return
        older = [other.step for other in self.log.commits() if other.number < commit.number]
        where = f"{self.storage.address}/{commit.folder}"
        raise Damaged(
            "E-CHECKPOINT-007",
            f"the checkpoint of step {commit.step} is damaged",
            why=f"{found or 'another host found it damaged'}\n{where}",
            fix=f"use the checkpoint before it, step {older[-1]}"
            if older
            else "check the disk; there is no older checkpoint",
        )

    def _saved_tree(self, commit: Commit, wanted: Any, part: str | None) -> Any:
        """Return the metadata of the arrays of a commit, or of one part. Raise a UserError if `wanted` has others."""
        with orbax_context(self.storage):
            saved = self.storage.with_retries(
                lambda: orbax.metadata(f"{self.storage.address}/{commit.folder}").metadata
            )
        if part is not None:
            saved = {part: saved.get(part)}
        difference = first_difference(saved, wanted)
        if difference is not None:
            raise UserError(
                "E-CHECKPOINT-008",
                f"the checkpoint of step {commit.step} belongs to another model or optimizer",
                why=f"{difference.name}: {difference.saved or 'nothing'} in the checkpoint, "
                f"{difference.wanted or 'nothing'} in the job\n{self.storage.address}/{commit.folder}",
                fix="undo the change of the job, or give it another name to start a new run",
            )
        return saved


def newest_step(folder: Path | str) -> int:
    """Return the step of the newest checkpoint that is not damaged. Raise UserError if the run has no checkpoint.

    If all checkpoints are damaged, this is the newest one, and reading it reports the damage.
    """
    reader = Reader(folder)
    found = reader.newest_good()
    if found is None:
        raise UserError(
            "E-CHECKPOINT-013",
            f"{str(folder).rpartition('/')[0]} has no checkpoint yet",
            why=f"{folder} is empty or missing",
            fix="train it first: forerun train job.yaml",
        )
    return found


def chosen_step(folder: Path | str, which: str) -> int:
    """Return the step that `--step` selects. Its files are verified when it is read.

    Args:
      folder: the folder of the checkpoints.
      which: `newest`, `best`, or the number of a step. The best is the kept checkpoint with the lowest recorded loss,
        which is that of the validation, or of the training if the job has no validation data.

    Raises:
      UserError: there is no such checkpoint, or none has a loss.
    """
    if which == "newest":
        return newest_step(folder)
    reader = Reader(folder)
    if which != "best":
        return reader.commit(int(which)).step
    losses = {step: reader.record(step).get("loss") for step in reader.steps()}
    known = {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    if not known:
        raise UserError(
            "E-CHECKPOINT-014",
            f"no checkpoint of {folder} has a loss to choose the best by",
            why=f"checkpoints: {', '.join(map(str, losses)) or 'none'}",
            fix="omit --step to use the newest checkpoint",
        )
    return min(known, key=lambda step: (known[step], -step))


# ---- Comparison of a saved tree with the job's, by name, shape and dtype of each leaf ----


@dataclass(frozen=True)
class SavedLeaf:
    """Shape and dtype of an array, printed for example as `float32[32000,512]`."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Difference:
    """A leaf that differs; `saved` or `wanted` is None if that side does not have it."""

    name: str
    saved: SavedLeaf | None
    wanted: SavedLeaf | None


def first_difference(saved: Any, wanted: Any) -> Difference | None:
    """Return the first leaf that differs, or None.

    Args:
      saved: metadata of the checkpoint, as nested dicts and lists.
      wanted: the job's pytree of shapes.
    """
    have, want = dict(_saved_leaves(saved, ())), dict(_wanted_leaves(wanted))
    for name in (*want, *(name for name in have if name not in want)):
        if have.get(name) != want.get(name):
            return Difference(name, have.get(name), want.get(name))
    return None


def in_saved_form(saved: Any, wanted: Any) -> Any:
    """Return the leaves of the job's tree in the structure of the checkpoint.

    Orbax also compares places without an array. A newer version has more of them, such as parameters that only one
    family has.

    Args:
      saved: metadata of the checkpoint, as nested dicts and lists. Its leaves have the names of the job's.
      wanted: the job's pytree of shapes.
    """
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}

    def part(node: Any, path: tuple[str, ...]) -> Any:
        if node is None:
            return None
        if isinstance(node, dict):
            return {key: part(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [part(value, (*path, str(index))) for index, value in enumerate(node)]
        return leaves[".".join(path)]

    return part(saved, ())


def in_job_form(loaded: Any, wanted: T) -> T:
    """Return the arrays of a checkpoint in the structure of the job's tree.

    Args:
      loaded: the arrays in the structure of the checkpoint.
      wanted: the job's pytree of shapes, with the same names of leaves.
    """
    arrays = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(loaded)}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], wanted)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _wanted_leaves(tree: Any) -> Iterator[tuple[str, SavedLeaf]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # keys are saved as integers
        yield _name(path), SavedLeaf(tuple(leaf.shape), str(leaf.dtype))


def _saved_leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, SavedLeaf]]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _saved_leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _saved_leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), SavedLeaf(tuple(tree.shape), str(tree.dtype))
