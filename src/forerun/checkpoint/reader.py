"""Reading a run's checkpoints: nothing in the folder is touched, and no byte is parsed that was not verified.

To read the arrays while the digests are computed would hide their time (a seventh of a restore's, in seconds of the
processor), but Orbax, given damaged files, writes hundreds of lines of its own to the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.checkpoint.log import Broken, Commit, Log
from forerun.checkpoint.manifest import Damage, damage
from forerun.checkpoint.patience import NONE, Away, Patience
from forerun.checkpoint.place import place_of
from forerun.checkpoint.quiet import quiet_orbax
from forerun.checkpoint.tree import first_difference
from forerun.errors import UserError

T = TypeVar("T")

STEP_FOLDER = re.compile(r"(?P<step>\d+)-(?P<fence>\d+)-(?P<attempt>\d+)(\.(orbax-checkpoint-tmp.*|part))?")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that could not be used, and why; its step is not known if the record itself is damaged."""

    step: int | None
    commit: int
    why: str

    def __str__(self) -> str:
        return f"{f'step {self.step}' if self.step is not None else f'commit {self.commit}'}: {self.why}"


@dataclass(frozen=True)
class Restored(Generic[T]):
    state: T
    step: int
    commit: int
    record: dict[str, Any]
    skipped: tuple[Skipped, ...]


class Damaged(UserError):
    """The files are not what was committed."""


class Reader:
    """What looks by a command that a person waits for fails at once if the bucket is away; a run has `patience`."""

    def __init__(
        self, folder: Path | str, patience: Patience = NONE, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        quiet_orbax()
        self.place = place_of(folder, patience, tell)
        self.log = Log(self.place)

    def identity(self) -> str:
        """Return the random text that identifies the run, also after a change of owner."""
        return self.place.patiently(self.log.identity)

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, ascending."""
        return sorted({commit.step for commit in self.commits()})

    def newest(self) -> int | None:
        """The step of the highest commit number."""
        commits = self.commits()
        return commits[-1].step if commits else None

    def record(self, step: int) -> dict[str, Any]:
        """What `save` was given as the record of this step."""
        return dict(self.commit(step).record)

    def commit(self, step: int) -> Commit:
        """The newest commit of this step."""
        found = [commit for commit in self.commits() if commit.step == step]
        if not found:
            raise UserError(
                f"there is no checkpoint of step {step}",
                why=f"{self.place.address} has {', '.join(map(str, self.steps())) or 'none'}",
                fix="take one of these",
            )
        return found[-1]

    def damage(self, step: int) -> Damage | None:
        """Verify without reading any array."""
        commit = self.commit(step)
        return damage(self.place, commit.folder, commit.files)

    def newest_good(self) -> int | None:
        """The step of the newest checkpoint whose files are what was committed."""
        commits = self.commits()
        for commit in reversed(commits):
            if damage(self.place, commit.folder, commit.files) is None:
                return commit.step
        return commits[-1].step if commits else None

    def restore(self, step: int, like: T, *, part: str | None = None) -> T:
        """The state of `step` as the tree of `like`, whose leaves are `jax.ShapeDtypeStruct`s with shardings; or only
        that `part` of it. Raises `Damaged` if a file is not what was committed."""
        return self._restored(self.commit(step), like, part)

    def restore_newest(self, like: T, *, part: str | None = None) -> Restored[T] | None:
        """The newest checkpoint whose files are what was committed, and which newer ones were not; None if there is
        no checkpoint at all. Raises if there are checkpoints and none is good."""
        skipped: list[Skipped] = []
        for record in reversed(self.place.patiently(self.log.records)):
            if isinstance(record, Broken):
                skipped.append(Skipped(None, record.number, record.why))
            elif isinstance(record, Commit):
                try:
                    state = self._restored(record, like, part)
                except Damaged as error:
                    skipped.append(Skipped(record.step, record.number, error.why))
                    continue
                return Restored(state, record.step, record.number, dict(record.record), tuple(skipped))
        if skipped:
            raise Damaged(
                "no checkpoint can be used",
                why="\n".join(map(str, skipped)),
                fix=f"check the disk under {self.place.address}; to train anew, start over with --fresh",
            )
        self.require_records()
        return None

    def require_records(self) -> None:
        """Folders of steps without any record are not ours to use or to remove."""
        self.place.patiently(self._require_records)

    def _require_records(self) -> None:
        if self.log.records():
            return
        found = [name for name in self.place.names() if name.isdigit() or STEP_FOLDER.fullmatch(name)]
        if found and not self.log.records():  # asked again: a run that has just begun claims the folder, then saves
            raise UserError(
                f"{self.place.address} has checkpoints without commit records",
                why=f"{', '.join(found[:5])}: written by a forerun before commit records, or commits/ was removed; "
                "without one, nobody can say whether they are whole",
                fix="put commits/ back, or start over with --fresh (the old folder is kept, renamed)",
            )

    def commits(self) -> list[Commit]:
        """Return the commits that can be read, ascending by number."""
        found = self.place.patiently(self.log.commits)
        if not found:
            self.require_records()
        return found

    def _restored(self, commit: Commit, like: T, part: str | None) -> T:
        if any(leaf.sharding is None for leaf in jax.tree.leaves(like)):
            raise ValueError("restore needs a sharding on every leaf")
        patiently = self.place.patiently
        share = hosts.part()
        self._require_good(commit, patiently(lambda: damage(self.place, commit.folder, commit.files, share)))
        self._require_same_model(commit, like, part)
        context = orbax.Context()
        context.multiprocessing.active_processes = hosts.everybody()
        context.pytree.loading.partial_load = part is not None

        def load() -> Any:
            with context:
                return orbax.load(f"{self.place.address}/{commit.folder}", like if part is None else {part: like})

        try:
            state = patiently(load) if share[1] == 1 else load()  # hosts that load together cannot try again alone
        except (jax.errors.JaxRuntimeError, Away):  # the devices' trouble or the network's, not the file's
            raise
        except Exception as error:
            raise UserError(
                f"the checkpoint of step {commit.step} cannot be read, though its files are what was committed",
                why=first_line(error),
                fix="run the same command again; if it fails again, please report it with this text",
            ) from error
        return state if part is None else state[part]

    def _require_good(self, commit: Commit, found: Damage | None) -> None:
        if hosts.true_on_all(found is None):
            return
        older = [other.step for other in self.log.commits() if other.number < commit.number]
        where = f"{self.place.address}/{commit.folder}"
        raise Damaged(
            f"the checkpoint of step {commit.step} is damaged",
            why=f"{found or 'another host found it damaged'}\n{where}",
            fix=f"take the one before it, step {older[-1]}"
            if older
            else "check the disk; there is no older checkpoint",
        )

    def _require_same_model(self, commit: Commit, like: Any, part: str | None) -> None:
        saved = self.place.patiently(lambda: orbax.metadata(f"{self.place.address}/{commit.folder}").metadata)
        if part is not None:
            saved, like = {part: saved.get(part)}, {part: like}
        difference = first_difference(saved, like)
        if difference is not None:
            raise UserError(
                f"the checkpoint of step {commit.step} is of another model or optimizer",
                why=f"{difference.name}: {difference.saved or 'nothing'} in the checkpoint, "
                f"{difference.wanted or 'nothing'} in the job\n{self.place.address}/{commit.folder}",
                fix="set the job back to what it was, or give it another name to start afresh",
            )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
