"""Copies of the state that several devices hold must be equal, bit for bit. If they are not, a device has computed or
kept something wrong, and it is named."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.program.build import Program
from forerun.program.fingerprint import compiled_fingerprints
from forerun.program.state import State
from forerun.supervise.limits import DAMAGED
from forerun.track.display import Display

NAMED = 4


class Corrupted(UserError):
    """Not the user's mistake: a supervisor starts again from the newest checkpoint."""

    exit_code = DAMAGED


@dataclass(frozen=True)
class Held:
    """An array of the state, and the groups of devices (places in the mesh) that hold the same part of it."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int

    @property
    def has_copies(self) -> bool:
        return any(len(group) > 1 for group in self.groups)


class Copies:
    """Looks at the state every so many steps, beside the run; what was seen is read when the step's figures are.

    Args:
      every: steps between looks; None never looks.
    """

    def __init__(self, program: Program, every: int | None) -> None:
        self._every = every
        self._devices = list(program.mesh.devices.flat)
        self._held = held(program.state, self._devices) if every else []
        self._seen: deque[tuple[int, jax.Array]] = deque()
        self._fingerprints = compiled_fingerprints(program.mesh, program.state) if every else None

    @property
    def compared_share(self) -> float:
        """Of the state's bytes, those that have a copy."""
        return sum(one.bytes for one in self._held if one.has_copies) / sum(one.bytes for one in self._held)

    def look(self, number: int, state: State) -> None:
        if self._every and number % self._every == 0:
            self._look(number, state)

    def prove(self, number: int, state: State) -> None:
        """Look and wait: for a state that is about to be saved."""
        if self._every:
            self._look(number, state)
            self.require_equal(number)

    def require_equal(self, number: int) -> None:
        """Of what was seen up to this step."""
        while self._seen and self._seen[0][0] <= number:
            at, table = self._seen.popleft()
            odd = self._differing(np.asarray(jax.device_get(table)))
            if odd:
                raise self._corrupted(at, odd)

    def _look(self, number: int, state: State) -> None:
        assert self._fingerprints is not None
        self._seen.append((number, self._fingerprints(state)))

    def _differing(self, table: NDArray[np.uint32]) -> list[tuple[Held, tuple[int, ...], tuple[int, ...]]]:
        """(array, who differs, who holds the same part) of all that is not equal; without a majority, all differ."""
        found = []
        for column, one in zip(table.T, self._held, strict=True):
            for group in one.groups:
                values = column[list(group)]
                usual, times = Counter(values.tolist()).most_common(1)[0]
                if times == len(group):
                    continue
                odd = tuple(place for place, value in zip(group, values, strict=True) if value != usual)
                found.append((one, odd if 2 * times > len(group) else group, group))
        return found

    def _corrupted(self, number: int, odd: list[tuple[Held, tuple[int, ...], tuple[int, ...]]]) -> Corrupted:
        places = sorted({place for _, who, _ in odd for place in who})
        one, who, group = odd[0]
        unsure = who == group
        named = ", ".join(self._named(place) for place in places[:NAMED])
        more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
        arrays = one.name if len(odd) == 1 else f"{one.name} and {len(odd) - 1} more arrays"
        return Corrupted(
            f"step {number}: silent corruption on {'one of ' if unsure else ''}{named}{more}",
            why=f"{arrays}: {len(group)} devices hold it and must hold the same bits; "
            + (
                "no majority does"
                if unsure
                else f"{len(group) - len(who)} do, {'this one does' if len(who) == 1 else 'these do'} not"
            ),
            fix="run the same command again (--supervise does it by itself): it goes on from the newest checkpoint, "
            "which was compared\nbefore it was saved; if the same device is named again, take its host out",
        )

    def _named(self, place: int) -> str:
        device = self._devices[place]
        return f"host {device.process_index} device {device.id}"


def held(state: State, devices: list[Any]) -> list[Held]:
    """What must be equal where, from the shardings alone."""
    arrays = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        for place, device in enumerate(devices):
            part = tuple(cut.indices(size) for cut, size in zip(indices[device], leaf.shape, strict=True))
            parts.setdefault(part, []).append(place)
        name = "state" + jax.tree_util.keystr(path)
        arrays.append(Held(name, tuple(map(tuple, parts.values())), leaf.size * leaf.dtype.itemsize))
    return arrays


def copies_of(job: Job, program: Program, display: Display) -> Copies:
    copies = Copies(program, job.guard.compare_every)
    if job.guard.compare_every and copies.compared_share < 1:
        display.warn(
            f"guard.compare_every compares {copies.compared_share:.1%} of the state: of the rest every device holds a "
            f"part of its own (mesh {program.derived.mesh}, data x fsdp x tp), and there is nothing to compare it with"
        )
    return copies
