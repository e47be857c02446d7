"""The space of a search: slices x meshes x micro-batches x remat, and what of it is ruled out by formula.

The effective batch is the job's in every candidate. Whatever is ruled out is counted under its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from forerun.config.schema import Job, Mesh, Remat
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape, check_model, divisors, resolve, valid_meshes
from forerun.hardware.slices import Slice, slice_named, slices
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.plan.footprint import Footprint, footprint, kept_names
from forerun.plan.question import Question
from forerun.units import GIB

REMATS = (
    Remat(policy="full"),
    Remat(policy="named", offload=("layer_in",)),
    Remat(policy="named", keep=("attention_out",), offload=("layer_in",)),
    Remat(policy="named", keep=("attention_out",)),
    Remat(policy="dots"),
    Remat(policy="none"),
)
FOREIGN_REMATS = tuple(remat for remat in REMATS if remat.policy in ("full", "none"))  # names are the decoder's
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")  # without --on; v2 and v3 are asked for by name
SIZES_PER_GENERATION = 3
LARGEST_TP = 8
COPIES = (1, 2, 4)  # of the weights, or one on every device
SAVED_MARGIN = 1.3  # the estimate of activations may be so much too high and still rule nothing out that fits
ROOM_FOR_KERNELS_BYTES = GIB

STATE = "weights and optimizer alone are larger than HBM"
SAVED = "saved activations are far larger than HBM"
BATCH = "the batch does not divide over the mesh"
SPLIT = "more tensor parallelism than needed: fsdp alone has room"
MANY_COPIES = "more copies of the weights than needed: fsdp does it with less memory"
HOURS = "even at the chip's peak it takes more than --max-hours"
MONEY = "even at the chip's peak it costs more than --max-usd"
DEVICES = "the slice has fewer devices than the job asks for"
NO_PRICE = "no price is known there"

Usd = Callable[[Slice], float | None]  # per hour, the whole slice


@dataclass(frozen=True)
class Candidate:
    """One way to run the job."""

    slice: Slice
    mesh: MeshShape
    micro_batch: int
    remat: Remat

    def job(self, job: Job) -> Job:
        mesh = Mesh(data=self.mesh.data, fsdp=self.mesh.fsdp, tp=self.mesh.tp)
        return job.model_copy(update={"mesh": mesh, "micro_batch": self.micro_batch, "remat": self.remat})

    def question(self, job: Job) -> Question:
        return Question(self.job(job), self.slice)

    def accumulation(self, batch: int) -> int:
        return batch // (self.micro_batch * self.mesh.data_parallel)

    def __str__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        return f"{self.slice.name} {self.mesh} micro-batch {self.micro_batch}, {remat_text(self.remat)}"


@dataclass(frozen=True)
class Space:
    """Candidates that are left, in no order, and those that were ruled out, each with the reason."""

    job: Job
    candidates: tuple[Candidate, ...]
    dropped: Mapping[Candidate, str]
    sizes: Footprint
    as_written: dict[str, Candidate] = field(default_factory=dict)  # the job's own values, by slice

    @property
    def size(self) -> int:
        return len(self.candidates) + len(self.dropped)

    @cached_property
    def ruled_out(self) -> Counter[str]:
        """How many for which reason."""
        return Counter(self.dropped.values())

    @cached_property
    def by_slice(self) -> dict[str, tuple[Candidate, ...]]:
        groups: dict[str, list[Candidate]] = {}
        for one in self.candidates:
            groups.setdefault(one.slice.name, []).append(one)
        return {name: tuple(group) for name, group in groups.items()}

    def guessed_seconds(self, one: Candidate) -> float:
        return self._guesses[one][0]

    def guessed_bytes(self, one: Candidate) -> float:
        return self._guesses[one][1]

    @cached_property
    def _guesses(self) -> dict[Candidate, tuple[float, float]]:
        return {one: (self._seconds(one), _guessed_bytes(self.sizes, one, self.job.batch)) for one in self.candidates}

    def _seconds(self, one: Candidate) -> float:
        accumulation = one.accumulation(self.job.batch)
        return self.sizes.guessed_seconds(one.slice.chip, one.mesh, one.micro_batch, accumulation, one.remat)


@dataclass(frozen=True)
class Bounds:
    """What the user allows, and what a slice costs per hour."""

    usd_per_hour: Usd
    max_hours: float | None = None
    max_usd: float | None = None
    needs_price: bool = False


def remat_text(remat: Remat) -> str:
    """`remat full`, or what is kept and offloaded."""
    if remat.policy != "named":
        return f"remat {remat.policy}"
    parts = [f"{verb} {'+'.join(names)}" for verb, names in (("keep", remat.keep), ("offload", remat.offload)) if names]
    return ", ".join(parts) or "remat named"


def slices_like(pattern: str) -> list[Slice]:
    """The standard slices that a glob matches, or those named, separated by commas."""
    chosen: dict[str, Slice] = {}
    for part in pattern.split(","):
        glob = part.strip().lower().replace("v5litepod", "v5e")
        if any(mark in glob for mark in "*?["):
            matches = [one for one in slices() if fnmatchcase(one.name, glob)]
            if not matches:
                raise UserError(
                    f"--on {part.strip()} matches no slice",
                    why="it is compared with the names of the standard slices, such as v6e-8 or v5p-16",
                    fix="--on 'v6e-*', or choose from: forerun hardware slices",
                )
        else:
            matches = [slice_named(part)]
        chosen |= {one.name: one for one in matches}
    return list(chosen.values())


def sensible_slices(job: Job, sizes: Footprint) -> list[Slice]:
    """For each generation, the smallest slice that holds weights and optimizer, and the next larger ones."""
    state = sizes.resting_bytes
    chosen = []
    for generation in GENERATIONS:
        own = [one for one in slices() if one.chip.name == generation and one.devices >= (job.devices or 1)]
        holding = [one for one in own if one.used_devices(job.devices) * (one.chip.usable_bytes or 0) > state]
        chosen += holding[:SIZES_PER_GENERATION]
    return chosen


def space_of(job: Job, on: str | None, bounds: Bounds) -> Space:
    """`job` is concrete."""
    sizes = footprint(job)
    chosen = slices_like(on) if on else sensible_slices(job, sizes)
    remats = FOREIGN_REMATS if is_plugin(job.model) else REMATS
    remats = (*(one for one in remats if not same_remat(one, job.remat)), job.remat)
    left: list[Candidate] = []
    dropped: dict[Candidate, str] = {}
    as_written: dict[str, Candidate] = {}
    if (most := max(chosen, key=lambda one: one.devices, default=None)) is not None:
        most.used_devices(job.devices)  # an error if no slice has that many
    for one in chosen:
        if one.devices < (job.devices or 1):
            dropped[Candidate(one, MeshShape(1, one.devices, 1), 1, job.remat)] = DEVICES
            continue
        own = _as_written(job, one)
        extra = [own.mesh] if own else []
        for candidate, reason in _of_slice(job, sizes, one, remats, bounds, extra):
            if reason:
                dropped[candidate] = reason
            else:
                left.append(candidate)
        if own and own in left:
            as_written[one.name] = own
    return Space(job, tuple(left), dropped, sizes, as_written)


def same_remat(one: Remat, other: Remat) -> bool:
    """The order of names does not count, and naming nothing is full remat."""

    def lists(remat: Remat) -> tuple[str, set[str], set[str]]:
        return "named" if remat.policy == "full" else remat.policy, kept_names(remat), set(remat.offload)

    return lists(one) == lists(other)


def _as_written(job: Job, on: Slice) -> Candidate | None:
    """The job's own mesh, micro-batch and remat on a slice, if they can be laid out there."""
    heads = None if is_plugin(job.model) else config_of(job.model).heads
    try:
        mesh = resolve(job.mesh.data, job.mesh.fsdp, job.mesh.tp, on.used_devices(job.devices), on.name)
        check_model(mesh, heads, job.batch, job.micro_batch)
    except UserError:
        return None
    return Candidate(on, mesh, job.micro_batch or job.batch // mesh.data_parallel, job.remat)


def _of_slice(
    job: Job, sizes: Footprint, on: Slice, remats: Sequence[Remat], bounds: Bounds, extra: Sequence[MeshShape]
) -> list[tuple[Candidate, str | None]]:
    """Every candidate of a slice with the reason against it, or None."""
    against = _against_slice(job, sizes, on, bounds)
    roomy = _fsdp_has_room(job, sizes, on)
    found: list[tuple[Candidate, str | None]] = []
    for mesh in dict.fromkeys([*meshes(job, on.used_devices(job.devices)), *extra]):
        share, rest = divmod(job.batch, mesh.data_parallel)
        if rest:
            found += [(Candidate(on, mesh, 1, remat), BATCH) for remat in remats]
            continue
        wanted = mesh in extra
        for micro in divisors(share):
            for remat in remats:
                candidate = Candidate(on, mesh, micro, remat)
                reason = against or _against(candidate, sizes)
                reason = reason or (None if wanted else _needless(mesh, roomy))
                found.append((candidate, reason))
    return found


def meshes(job: Job, devices: int) -> list[MeshShape]:
    """data x fsdp x tp with tp a power of two that divides the heads, 8 at most."""
    heads = None if is_plugin(job.model) else config_of(job.model).heads
    allowed = [tp for tp in (1, 2, 4, 8) if tp <= LARGEST_TP and heads is not None and heads % tp == 0] or [1]
    return [mesh for mesh in valid_meshes(devices) if mesh.tp in allowed]


def _against_slice(job: Job, sizes: Footprint, on: Slice, bounds: Bounds) -> str | None:
    hours = sizes.least_seconds(on.chip, on.used_devices(job.devices)) * (job.steps or 0) / 3600
    usd = bounds.usd_per_hour(on)
    if bounds.max_hours is not None and hours > bounds.max_hours:
        return HOURS
    if usd is None:
        return NO_PRICE if bounds.needs_price or bounds.max_usd is not None else None
    return MONEY if bounds.max_usd is not None and hours * usd > bounds.max_usd else None


def _against(one: Candidate, sizes: Footprint) -> str | None:
    limit = one.slice.chip.usable_bytes or 0
    state = sizes.state_bytes(one.mesh)
    if state > limit:
        return STATE
    saved = sizes.saved_bytes(one.mesh, one.micro_batch, one.remat)
    return SAVED if state + saved / SAVED_MARGIN > limit else None


def _needless(mesh: MeshShape, roomy: bool) -> str | None:
    if roomy and mesh.tp > 2:
        return SPLIT
    return MANY_COPIES if mesh.data not in COPIES and mesh.fsdp > 1 else None


def _fsdp_has_room(job: Job, sizes: Footprint, on: Slice) -> bool:
    """Whether fsdp over all devices is estimated to fit with a fifth to spare, one sequence at a time."""
    devices = on.used_devices(job.devices)
    if job.batch % devices:
        return False
    thrifty = Candidate(on, MeshShape(1, devices, 1), 1, REMATS[0])
    return _guessed_bytes(sizes, thrifty, job.batch) < 0.8 * (on.chip.usable_bytes or 0)


def _guessed_bytes(sizes: Footprint, one: Candidate, batch: int) -> float:
    state = sizes.state_bytes(one.mesh) + sizes.gradient_bytes(one.mesh, one.accumulation(batch))
    return state + sizes.saved_bytes(one.mesh, one.micro_batch, one.remat) + ROOM_FOR_KERNELS_BYTES
