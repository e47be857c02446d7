"""The space of a search: slices x meshes x micro-batch sizes x remat policies.

Every candidate keeps the job's effective batch. Candidates that cannot be good are ruled out by formula, and counted by
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from forerun.config.schema import Job, Mesh, Remat
from forerun.errors import UserError
from forerun.hardware.chips import require_compute_dtype, require_matmul
from forerun.hardware.mesh import MeshShape, check_model, check_sequence, divisors, slices_of, valid_meshes
from forerun.hardware.slices import Slice, gpu_machines, slice_named, slices
from forerun.planner.compile.request import CompileRequest
from forerun.planner.search.lower_bound import Footprint, footprint, kept_names
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

REMATS = (
    Remat(policy="full"),
    Remat(policy="named", offload=("layer_in",)),
    Remat(policy="named", keep=("attention_out",), offload=("layer_in",)),
    Remat(policy="named", keep=("attention_out",)),
    Remat(policy="dots"),
    Remat(policy="none"),
)
FOREIGN_REMATS = tuple(
    remat for remat in REMATS if remat.policy in ("full", "none")
)  # only decoders have named residuals
LARGEST_TP = 8
COPIES = (1, 2, 4)  # numbers of copies of the weights to try, besides one copy on every device
SAVED_MARGIN = 1.3  # the estimate of activations may be too high by this factor without ruling out a plan that fits
ROOM_FOR_KERNELS_BYTES = GIB

STATE = "weights and optimizer alone are larger than HBM"
SAVED = "saved activations are far larger than HBM"
BATCH = "the batch does not divide over the mesh"
SPLIT = "more tensor parallelism than needed: fsdp alone fits"
MANY_COPIES = "more copies of the weights than needed: fsdp needs less memory"
HOURS = "even at the chip's peak it takes more than --max-hours"
MONEY = "even at the chip's peak it costs more than --max-usd"
DEVICES = "the slice has fewer devices than the job asks for"
NO_PRICE = "no price is known for the slice"
NODES = "tensor parallelism across machines: their network is too slow for it"
KERNEL = {  # attention kernels of the job that run on one platform only
    "splash": ("tpu", "attention: splash is a kernel for TPUs; set attention=auto"),
    "cudnn": ("gpu", "attention: cudnn is a kernel for GPUs; set attention=auto"),
}

GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")  # without --on; v2 and v3 must be named there
SIZES_PER_GENERATION = 3
GPUS = ("H100", "H200", "B200", "A100-80", "A100-40", "L40S", "L4", "4090", "5090")  # without --on
SIZES_PER_GPU = 2
MACHINE_COUNTS = (2, 4, 8)  # numbers of machines with eight GPUs, for jobs that are too large for one machine

Usd = Callable[[Slice], float | None]  # price of a complete slice per hour; None if it is unknown


@dataclass(frozen=True)
class Candidate:
    """One way to run the job: a slice, a mesh, a micro-batch size and a remat policy."""

    slice: Slice
    mesh: MeshShape
    micro_batch: int
    remat: Remat

    def changed(self, resolved: ResolvedJob) -> ResolvedJob:
        """Return the job with the mesh, micro-batch and remat of this candidate."""
        names = ("data", "fsdp", "tp", "context", "expert")
        mesh = resolved.job.mesh.model_copy(update={name: getattr(self.mesh, name) for name in names})
        return resolved.with_values(mesh=mesh, micro_batch=self.micro_batch, remat=self.remat)

    def question(self, resolved: ResolvedJob) -> CompileRequest:
        """Return the request to compile this candidate."""
        return CompileRequest(self.changed(resolved), self.slice)

    def accumulation(self, batch: int) -> int:
        """Return the number of micro-batches per device and step."""
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
    """The candidates of a search, in no order, and those that were ruled out."""

    resolved: ResolvedJob
    candidates: tuple[Candidate, ...]
    dropped: Mapping[Candidate, str]  # ruled out, with the reason
    sizes: Footprint
    as_written: dict[str, Candidate] = field(default_factory=dict)  # by slice: the job's own values

    @property
    def job(self) -> Job:
        """The job before the search, with its open values filled in."""
        return self.resolved.job

    @property
    def size(self) -> int:
        return len(self.candidates) + len(self.dropped)

    @cached_property
    def ruled_out(self) -> Counter[str]:
        """Number of candidates that were ruled out, by reason."""
        return Counter(self.dropped.values())

    @cached_property
    def by_slice(self) -> dict[str, tuple[Candidate, ...]]:
        groups: dict[str, list[Candidate]] = {}
        for one in self.candidates:
            groups.setdefault(one.slice.name, []).append(one)
        return {name: tuple(group) for name, group in groups.items()}

    def guessed_seconds(self, one: Candidate) -> float:
        """Return the estimated time of a step."""
        return self._guesses[one][0]

    def guessed_bytes(self, one: Candidate) -> float:
        """Return the estimated HBM per device."""
        return self._guesses[one][1]

    @cached_property
    def _guesses(self) -> dict[Candidate, tuple[float, float]]:
        return {one: (self._seconds(one), _guessed_bytes(self.sizes, one, self.job.batch)) for one in self.candidates}

    def _seconds(self, one: Candidate) -> float:
        accumulation = one.accumulation(self.job.batch)
        return self.sizes.guessed_seconds(one.slice, one.mesh, one.micro_batch, accumulation, one.remat)


@dataclass(frozen=True)
class Bounds:
    """The user's limits, the prices of slices, and what prevents compiling for them."""

    usd_per_hour: Usd
    max_hours: float | None = None
    max_usd: float | None = None
    needs_price: bool = False  # whether slices without a price are ruled out
    obstacle: Callable[[Slice], str | None] = lambda one: None  # the reason why a slice cannot be compiled for


def remat_text(remat: Remat) -> str:
    """Return a remat policy as text, for example `remat full` or `keep attention_out, offload layer_in`."""
    if remat.policy != "named":
        return f"remat {remat.policy}"
    parts = [f"{verb} {'+'.join(names)}" for verb, names in (("keep", remat.keep), ("offload", remat.offload)) if names]
    return ", ".join(parts) or "remat named"


def space_of(resolved: ResolvedJob, on: str | None, bounds: Bounds) -> Space:
    """Return all candidates of a search, including those that are ruled out.

    Args:
        resolved: The job.
        on: Names or globs of slices, separated by commas. None selects slices that may fit the job.
        bounds: The user's limits and the prices.

    Raises:
        UserError: A slice is unknown, or none has as many devices as the job wants.
    """
    job, sizes = resolved.job, footprint(resolved)
    check_sequence(MeshShape(1, 1, 1, context=job.mesh.context), job.sequence)
    chosen = slices_like(on) if on else default_search_slices(job, sizes)
    named = named_exactly(on)  # for these, a missing compiler is an error later
    remats = FOREIGN_REMATS if resolved.config is None else REMATS
    remats = (*(one for one in remats if not same_remat(one, job.remat)), job.remat)
    left: list[Candidate] = []
    dropped: dict[Candidate, str] = {}
    as_written: dict[str, Candidate] = {}
    if (most := max(chosen, key=lambda one: one.devices, default=None)) is not None:
        most.used_devices(job.devices)  # raises if no slice has that many devices
    for one in chosen:
        if one.devices < (job.devices or 1):
            dropped[Candidate(one, MeshShape(1, one.devices, 1), 1, job.remat)] = DEVICES
            continue
        own = _as_written(resolved, one)
        extra = [own.mesh] if own else []
        against = None if one.name in named else bounds.obstacle(one)
        against = against or _slice_reason(job, sizes, one, bounds)
        for candidate, reason in _slice_candidates(resolved, sizes, one, remats, against, extra):
            if reason:
                dropped[candidate] = reason
            else:
                left.append(candidate)
        if own and own in left:
            as_written[one.name] = own
    return Space(resolved, tuple(left), dropped, sizes, as_written)


def same_remat(one: Remat, other: Remat) -> bool:
    """Return whether two policies keep the same. The order of names is ignored, and naming nothing is full remat."""

    def lists(remat: Remat) -> tuple[str, set[str], set[str]]:
        return "named" if remat.policy == "full" else remat.policy, kept_names(remat), set(remat.offload)

    return lists(one) == lists(other)


def _as_written(resolved: ResolvedJob, on: Slice) -> Candidate | None:
    """Return the candidate with the job's own mesh, micro-batch and remat, or None if the slice cannot run it."""
    job = resolved.job
    try:
        mesh = CompileRequest(resolved, on).mesh_shape()
        check_model(mesh, resolved.model_facts.heads, job.batch, job.micro_batch)
    except UserError:
        return None
    return Candidate(on, mesh, job.micro_batch or job.batch // mesh.data_parallel, job.remat)


def _slice_candidates(
    resolved: ResolvedJob,
    sizes: Footprint,
    on: Slice,
    remats: Sequence[Remat],
    against: str | None,
    extra: Sequence[MeshShape],
) -> list[tuple[Candidate, str | None]]:
    """Return every candidate of a slice with the reason to rule it out, or None.

    `against` is a reason that holds for all of them. The meshes in `extra` (the job's own) are never ruled out as
    needless.
    """
    job = resolved.job
    roomy = _fsdp_has_room(job, sizes, on)
    found: list[tuple[Candidate, str | None]] = []
    shapes = meshes(resolved.model_facts.heads, on.used_devices(job.devices), on.slices, job.mesh)
    for mesh in dict.fromkeys([*shapes, *extra]):
        share, rest = divmod(job.batch, mesh.data_parallel)
        if rest:
            found += [(Candidate(on, mesh, 1, remat), BATCH) for remat in remats]
            continue
        wanted = mesh in extra
        for micro in divisors(share):
            for remat in remats:
                candidate = Candidate(on, mesh, micro, remat)
                reason = against or _memory_reason(candidate, sizes)
                reason = reason or (None if wanted else _needless_reason(on, mesh, roomy))
                found.append((candidate, reason))
    return found


def meshes(heads: int | None, devices: int, slices: int = 1, given: Mesh | None = None) -> list[MeshShape]:
    """Return all meshes whose tp is a power of two that divides the heads, 8 at most.

    The axes context and expert have the sizes in `given`. All slices have the same mesh.
    """
    allowed = [tp for tp in (1, 2, 4, 8) if tp <= LARGEST_TP and heads is not None and heads % tp == 0] or [1]
    context, expert = (given.context, given.expert) if given else (1, 1)
    found = valid_meshes(devices // slices, context, expert)
    return [replace(mesh, slices=slices) for mesh in found if mesh.tp in allowed]


def _slice_reason(job: Job, sizes: Footprint, on: Slice, bounds: Bounds) -> str | None:
    """Return the reason to rule out all candidates of a slice because of its platform, time or cost, or None."""
    platform, reason = KERNEL.get(job.attention, (on.platform, ""))
    if platform != on.platform:
        return reason
    try:
        require_compute_dtype(on.chip, job.precision.compute)
        require_matmul(on.chip, job.precision.matmul)
        slices_of(job.mesh.slices, on.slices, on.platform, job.devices, on.name, job.mesh.min_slices)
    except UserError as error:
        return error.what
    hours = sizes.lower_bound_seconds(on.chip, on.used_devices(job.devices)) * (job.steps or 0) / 3600
    usd = bounds.usd_per_hour(on)
    if bounds.max_hours is not None and hours > bounds.max_hours:
        return HOURS
    if usd is None:
        return NO_PRICE if bounds.needs_price or bounds.max_usd is not None else None
    return MONEY if bounds.max_usd is not None and hours * usd > bounds.max_usd else None


def _memory_reason(one: Candidate, sizes: Footprint) -> str | None:
    """Return the reason to rule out a candidate because of its memory, or None."""
    limit = one.slice.chip.usable_bytes or 0
    state = sizes.lower_bound_bytes(one.mesh)
    if state > limit:
        return STATE
    saved = sizes.saved_bytes(one.mesh, one.micro_batch, one.remat)
    return SAVED if state + saved / SAVED_MARGIN > limit else None


def _needless_reason(on: Slice, mesh: MeshShape, roomy: bool) -> str | None:
    """Return the reason to rule out a mesh that another one surely beats, or None."""
    if on.platform == "gpu" and mesh.tp > on.devices // on.hosts:
        return NODES
    if roomy and mesh.tp > 2:
        return SPLIT
    one_per_machine = on.platform == "gpu" and mesh.data == on.hosts
    return MANY_COPIES if mesh.data not in COPIES and mesh.fsdp > 1 and not one_per_machine else None


def _fsdp_has_room(job: Job, sizes: Footprint, on: Slice) -> bool:
    """Return whether fsdp over all devices with micro-batch 1 is estimated to leave a fifth of HBM free."""
    devices = on.used_devices(job.devices)
    if job.batch % devices:
        return False
    thrifty = Candidate(on, MeshShape(1, devices // on.slices, 1, slices=on.slices), 1, REMATS[0])
    return _guessed_bytes(sizes, thrifty, job.batch) < 0.8 * (on.chip.usable_bytes or 0)


def _guessed_bytes(sizes: Footprint, one: Candidate, batch: int) -> float:
    """Return the estimated HBM per device of a candidate."""
    state = sizes.lower_bound_bytes(one.mesh) + sizes.gradient_bytes(one.mesh, one.accumulation(batch))
    return state + sizes.saved_bytes(one.mesh, one.micro_batch, one.remat) + ROOM_FOR_KERNELS_BYTES


# ---- The slices of a search: those that `--on` names or matches, or sensible ones ----


def slices_like(pattern: str) -> list[Slice]:
    """Return the slices of a comma-separated list of names and globs.

    Globs match standard TPU slices and single GPU machines only.
    """
    chosen: dict[str, Slice] = {}
    for part in pattern.split(","):
        matches = _matches(part) if _is_glob(part) else [slice_named(part)]
        chosen |= {one.name: one for one in matches}
    return list(chosen.values())


def named_exactly(pattern: str | None) -> set[str]:
    """Return the names of the slices that a list of names and globs names without a glob."""
    parts = pattern.split(",") if pattern else []
    return {slice_named(part).name for part in parts if not _is_glob(part)}


def _is_glob(part: str) -> bool:
    return any(mark in part for mark in "*?[")


def _matches(part: str) -> list[Slice]:
    glob = part.strip().lower().replace("v5litepod", "v5e")
    matches = [one for one in (*slices(), *gpu_machines()) if fnmatchcase(one.name, glob)]
    if matches:
        return matches
    raise UserError(
        "E-PLAN-003",
        f"--on {part.strip()} matches no slice",
        why="a pattern is compared with the names of standard slices and single GPU machines, such as v6e-8 or h100-8",
        fix="--on 'v6e-*,h100-*', or choose from: forerun hardware slices",
    )


def default_search_slices(job: Job, sizes: Footprint) -> list[Slice]:
    """Return the smallest slices of each generation, and machines of each GPU, that hold weights and optimizer."""

    def holding(known: Iterator[Slice], most: int) -> list[Slice]:
        own = (one for one in known if one.devices >= (job.devices or 1))
        large = [one for one in own if one.used_devices(job.devices) * one.chip.usable_bytes > sizes.resting_bytes]
        return large[:most]

    chosen = []
    for generation in GENERATIONS:
        own = (one for one in slices() if one.chip.name == generation)
        chosen += holding(own, SIZES_PER_GENERATION)
    for gpu in GPUS:
        chosen += holding(_machines(gpu), SIZES_PER_GPU)
    return chosen


def _machines(gpu: str) -> Iterator[Slice]:
    """Yield the machines of a GPU, smallest first, then several of the largest if the speed of its network is known."""
    largest = None
    for one in gpu_machines():
        if one.chip.name == gpu:
            yield one
            largest = one
    if largest is not None and largest.chip.gpu and largest.chip.gpu.network_bytes_per_second:
        yield from (slice_named(f"{largest.name}x{nodes}") for nodes in MACHINE_COUNTS)
