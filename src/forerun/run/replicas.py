"""Detection of silent corruption: replicas of the state on several devices must be equal, bit for bit.

If they differ, a device has computed or stored a wrong value. The error names the device.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.exit_codes import DAMAGED
from forerun.program.build import Program
from forerun.program.fingerprint import compiled_fingerprints
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.hooks import FinishedStep, Hook

NAMED = 4


class CorruptionError(UserError):
    """Replicas differ. A supervisor restarts the run from the newest checkpoint."""

    exit_code = DAMAGED


@dataclass(frozen=True)
class ReplicatedArray:
    """An array of the state and the devices that hold its parts.

    Args:
      name: its path in the state.
      groups: for each part of the array, the devices that hold it, as positions in the mesh.
      bytes: its size.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int

    @property
    def has_replicas(self) -> bool:
        """Return whether two or more devices hold the same part."""
        return any(len(group) > 1 for group in self.groups)


# An array, the devices that differ, and all devices that hold the same part. If no value has a majority, all devices
# of the part count as different.
Difference = tuple[ReplicatedArray, tuple[int, ...], tuple[int, ...]]


class ReplicaCheck(Hook):
    """Compares the replicas of the state every few steps.

    The devices compute the fingerprints after a step. The host reads them together with the metrics of that step, so it
    does not wait for them.

    Args:
      every: steps between two comparisons, or None to compare nothing.
    """

    def __init__(self, program: Program, every: int | None) -> None:
        self._every = every
        self._devices = list(program.mesh.devices.flat)
        self._arrays = replicated_arrays(program.state, self._devices) if every else []
        self._recorded: deque[tuple[int, jax.Array]] = deque()
        self._fingerprints = compiled_fingerprints(program.mesh, program.state) if every else None

    @property
    def compared_share(self) -> float:
        """Return the share of the state's bytes that has replicas."""
        return sum(one.bytes for one in self._arrays if one.has_replicas) / sum(one.bytes for one in self._arrays)

    def on_dispatch(self, step: int, state: State) -> None:
        """Compute the fingerprints of every n-th step, before the next step reuses the buffers of its state."""
        if self._every and step % self._every == 0:
            self.record(step, state)

    def on_finish(self, finished: FinishedStep) -> None:
        self.require_equal(finished.step)

    def record(self, step: int, state: State) -> None:
        """Dispatch the computation of a state's fingerprints, for `require_equal`. Does not wait for the devices."""
        if self._fingerprints is not None:
            self._recorded.append((step, self._fingerprints(state)))

    def require_equal(self, step: int) -> None:
        """Compare all recorded states up to this step.

        Raises:
          CorruptionError: replicas differ.
        """
        while self._recorded and self._recorded[0][0] <= step:
            recorded, table = self._recorded.popleft()
            odd = self._differing(np.asarray(jax.device_get(table)))
            if odd:
                raise self._corrupted(recorded, odd)

    def _differing(self, table: NDArray[np.uint32]) -> list[Difference]:
        """Return the parts whose replicas are not equal, from a table of fingerprints [devices, arrays]."""
        found = []
        for column, one in zip(table.T, self._arrays, strict=True):
            for group in one.groups:
                values = column[list(group)]
                usual, times = Counter(values.tolist()).most_common(1)[0]
                if times == len(group):
                    continue
                odd = tuple(place for place, value in zip(group, values, strict=True) if value != usual)
                found.append((one, odd if 2 * times > len(group) else group, group))
        return found

    def _corrupted(self, step: int, odd: list[Difference]) -> CorruptionError:
        places = sorted({place for _, who, _ in odd for place in who})
        one, who, group = odd[0]
        unsure = who == group
        named = ", ".join(self._named(place) for place in places[:NAMED])
        more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
        arrays = one.name if len(odd) == 1 else f"{one.name} and {len(odd) - 1} more arrays"
        return CorruptionError(
            "E-RUN-015",
            f"step {step}: silent corruption on {'one of ' if unsure else ''}{named}{more}",
            why=f"{arrays}: {len(group)} devices hold it and must hold the same bits; "
            + (
                "no majority does"
                if unsure
                else f"{len(group) - len(who)} do, {'this one does' if len(who) == 1 else 'these do'} not"
            ),
            fix="run the same command again (--supervise does this automatically): it resumes from the newest "
            "checkpoint, which was\nchecked before it was saved; if the same device is named again, replace its host",
        )

    def _named(self, place: int) -> str:
        device = self._devices[place]
        return f"host {device.process_index} device {device.id}"


def replicated_arrays(state: State, devices: list[Any]) -> list[ReplicatedArray]:
    """Return the arrays of a state with the devices that hold their parts. Reads only shapes and shardings."""
    arrays = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        for place, device in enumerate(devices):
            part = tuple(cut.indices(size) for cut, size in zip(indices[device], leaf.shape, strict=True))
            parts.setdefault(part, []).append(place)
        name = "state" + jax.tree_util.keystr(path)
        arrays.append(ReplicatedArray(name, tuple(map(tuple, parts.values())), leaf.size * leaf.dtype.itemsize))
    return arrays


def replica_check_of(resolved: ResolvedJob, program: Program, reporter: Reporter) -> ReplicaCheck:
    """Return the job's replica check. Warn if a part of the state has no replicas."""
    every = resolved.job.guard.compare_every
    check = ReplicaCheck(program, every)
    if every and check.compared_share < 1:
        reporter.warn(
            f"guard.compare_every compares {check.compared_share:.1%} of the state: the rest is split over all devices "
            f"(mesh {program.derived.mesh}, data x fsdp x tp), so it has no replicas to compare"
        )
    return check
