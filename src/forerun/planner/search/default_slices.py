"""The default slices and GPU machines of a plan without --on.

They are the smallest of each generation that may fit the job, and the next one. The choice is by formula, without
compiling. Some data must be in device memory whatever the compiler does: weights, optimizer, gradients, and the layer
inputs that even full remat keeps. A slice with less memory than that is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.config.schema import Job, Mesh, Remat
from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.gpu_names import LARGEST_NODES
from forerun.hardware.slices import Slice, gpu_machines, slice_named, slices
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, Bytes

Platform = Literal["tpu", "gpu"]
PLATFORMS: tuple[Platform, ...] = ("tpu", "gpu")
MAX_COMPILES = 12  # A small model takes about a minute on two idle cores.
GENERATIONS = ("v6e", "v5e", "v5p", "v4", "tpu7x")  # In the order in which they are compiled.
OLD = ("v3", "v2")  # For small jobs only, and only if no GPUs are compared.
# GPUs in the order in which they are compiled. At most MOST_GPUS of them are compiled. The GPUs without NVLink are for
# jobs that fit one GPU: several of them spend most of a step in communication.
GPUS = ("H100", "A100-80", "4090", "L4", "H200", "B200")
MOST_GPUS = 4
SMALL_BYTES = 8 * GIB
LARGEST_CHIPS = 1024
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
SPLITS = (1, 2, 4, 8)  # sizes of tensor parallelism to try
WIDE_BATCH = 256  # a batch that is a multiple of this divides over most slices


@dataclass(frozen=True)
class DefaultSlice:
    """A slice to compile for. `changes` are overrides that the job needed to run on it; usually there are none."""

    question: CompileRequest
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SliceChoice:
    """For each generation the slices that may fit the job, smallest first; and why other generations are omitted."""

    by_generation: dict[str, list[DefaultSlice]]
    left_out: tuple[str, ...]
    postponed: tuple[str, ...] = ()  # generations that are named in the notes and not compiled

    def first(self) -> list[DefaultSlice]:
        """Return the smallest slice of each generation."""
        return [own[0] for name, own in self.by_generation.items() if name not in self.postponed]

    def second(self, verdicts: Sequence[FitResult]) -> list[DefaultSlice]:
        """Return the next larger slices, first of generations whose smallest slice was too small.

        `verdicts` are the results so far. At most MAX_COMPILES slices are compiled in total.
        """
        fits = {v.question.slice.chip.name: v.fits for v in verdicts}
        order = sorted(self.by_generation, key=lambda name: fits.get(name, False))  # stable
        order = [name for name in order if name not in self.postponed]
        more = [self.by_generation[name][1] for name in order if len(self.by_generation[name]) > 1]
        return more[: max(0, MAX_COMPILES - len(verdicts))]

    def notes(self, compiled: Sequence[DefaultSlice]) -> list[str]:
        """Return lines for the report about the generations that were omitted and the slices that were not compiled."""
        names = {one.question.slice.name for one in compiled}
        rest = [one for own in self.by_generation.values() for one in own if one.question.slice.name not in names]
        notes = [f"omitted: {why}" for why in self.left_out]
        if rest:
            listed = ", ".join(one.question.slice.name for one in rest)
            notes.append(f"not compiled, to save time: {listed}")
        if plain := ",".join(one.question.slice.name for one in rest if not one.changes):
            notes[-1] += f"; to compile: --on {plain}"
        return notes


def platforms_of(job: Job) -> tuple[Platform, ...]:
    """Return the platforms on which the job is planned: those that `device` names, or both."""
    wanted = (job.device,) if isinstance(job.device, str) else job.device
    named = tuple(one for one in PLATFORMS if one in wanted)
    return named or PLATFORMS


def default_slices(resolved: ResolvedJob, platforms: Sequence[Platform] = PLATFORMS) -> SliceChoice:
    """Return the slices of each generation to compile this job for, and the GPU machines.

    Args:
        resolved: The job.
        platforms: The platforms whose compiler is installed and which the job allows.

    Raises:
        UserError: No slice and no machine can run the job, by formula.
    """
    needs = Needs.of(resolved)
    chosen: dict[str, list[DefaultSlice]] = {}
    left_out: list[str] = []
    small = needs.state_bytes + needs.gradient_bytes <= SMALL_BYTES
    for generation in _generations(platforms, small):
        own, why = _generation_slices(resolved, generation, needs)
        if own:
            chosen[generation] = own
        else:
            left_out.append(f"{generation.lower()} ({why})")
    if "tpu" in platforms and not small:
        resting = Bytes(needs.state_bytes + needs.gradient_bytes)
        left_out.append(f"v2 and v3 (for small jobs only; weights, optimizer and gradients are {resting})")
    if not chosen:
        kinds = {"tpu": "slice of any generation", "gpu": "GPU machine"}
        places = " and no ".join(kinds[platform] for platform in platforms)
        raise UserError(
            "E-PLAN-011",
            f"no {places} can run this job",
            why="; ".join(left_out),
            fix=_suggested_change(resolved, needs, platforms),
        )
    gpus = [name for name in chosen if name in GPUS]
    return SliceChoice(chosen, tuple(left_out), tuple(gpus[MOST_GPUS:]))


def _generations(platforms: Sequence[Platform], small: bool) -> tuple[str, ...]:
    """Return the generations to consider, in the order in which they are compiled."""
    tpus = GENERATIONS if "tpu" in platforms else ()
    if "gpu" in platforms:
        return (*tpus, *GPUS)
    return (*tpus, *(OLD if small else ()))


def _suggested_change(resolved: ResolvedJob, needs: Needs, platforms: Sequence[Platform]) -> str:
    """Return the mildest change with which the job may fit some slice, by the same formulas."""
    job = resolved.job
    wider = -(-job.batch // WIDE_BATCH) * WIDE_BATCH
    changes: list[tuple[str, dict[str, Any]]] = [("micro_batch=1", {"micro_batch": 1})]
    changes.append((f"batch={wider} micro_batch=1", {"batch": wider, "micro_batch": 1}))
    if resolved.config is not None:
        remat = {"remat": Remat(policy="named", offload=("layer_in",))}
        more = [
            (f"{words} 'remat={{policy: named, offload: [layer_in]}}'", change | remat) for words, change in changes
        ]
        changes = [changes[0], more[0], changes[1], more[1]]
    for words, change in changes:
        changed = resolved.with_values(**change)
        changed_needs = Needs.of(changed)
        for generation in _generations(platforms, small=False):
            own, _ = _generation_slices(changed, generation, changed_needs)
            if own:
                return f"with {' '.join((words, *own[0].changes))} it might fit: --on {own[0].question.slice.name}"
    known = [one for name in _generations(platforms, small=False) for one in _sizes(name)]
    room, name = max((one.devices * (one.chip.usable_bytes or 0), one.name) for one in known)
    resting = needs.state_bytes + needs.gradient_bytes
    if resting > room:
        larger = f"{resting / room:.3g} x the memory of {name}"
        return f"make the model smaller: its weights, optimizer and gradients are {larger}"
    return "make the sequence shorter or the model smaller; a batch that is a multiple of 256 allows the most slices"


@dataclass(frozen=True)
class Needs:
    """The memory that a job needs in any case, over all devices."""

    state_bytes: int  # split over fsdp x tp, as are the gradients
    gradient_bytes: int
    layer_input_bytes_per_sequence: int  # 0 for a user's model, where it is unknown

    @classmethod
    def of(cls, resolved: ResolvedJob) -> Needs:
        """Return the needs of a job."""
        from forerun.program.state import resting

        job, config = resolved.job, resolved.config
        sizes, inputs = resting(resolved), 0
        if config is not None and "layer_in" not in job.remat.offload:
            inputs = config.layers * job.sequence * config.embed * FLOAT_BYTES[job.precision.compute]
        return cls(sizes.state_bytes, sizes.gradient_bytes, inputs)

    def per_device_bytes(self, question: CompileRequest) -> float:
        """Return the minimum bytes per device with the mesh and micro-batch of a request."""
        mesh, job = question.mesh_shape(), question.job
        micro = job.micro_batch or job.batch // mesh.data_parallel
        shards = mesh.weight_parts
        return (
            self.state_bytes + self.gradient_bytes
        ) / shards + micro * self.layer_input_bytes_per_sequence / mesh.context


def _generation_slices(resolved: ResolvedJob, generation: str, needs: Needs) -> tuple[list[DefaultSlice], str]:
    """Return at most two slices of a generation, and the reason against the last slice that was skipped."""
    own: list[DefaultSlice] = []
    why = f"its largest slice here has {LARGEST_CHIPS} chips"
    for one in _sizes(generation):
        candidate, trouble = _layout_on(resolved, one)
        if candidate is None:
            why = f"{one.name}: {trouble}"
            continue
        needed, usable = needs.per_device_bytes(candidate.question), one.chip.usable_bytes or 0
        if needed > usable:
            why = f"{one.name} needs at least {Bytes(needed)} per device and has {Bytes(usable)}"
            continue
        own.append(candidate)
        if len(own) == 2:
            break
    return own, why


def _sizes(generation: str) -> list[Slice]:
    """Return the slices of a TPU generation, or the machines of a GPU, smallest first."""
    gpu = chip_named(generation).gpu
    if gpu is None:
        return [one for one in slices() if one.chip.name == generation and one.chips <= LARGEST_CHIPS]
    own = [one for one in gpu_machines() if one.chip.name == generation]
    if gpu.nvlink_bytes_per_second is None:
        return own[:1]
    nodes = [2**power for power in range(1, LARGEST_NODES.bit_length())]
    return [*own, *(slice_named(f"{own[-1].name}x{count}") for count in nodes)]


def _layout_on(resolved: ResolvedJob, slice_: Slice) -> tuple[DefaultSlice | None, str]:
    """Return the job on the slice, unchanged or with the nearest mesh that keeps its batch.

    If neither is possible, return None and the reason.
    """
    trouble = ""
    for changed in _variants(resolved, slice_):
        question = CompileRequest(changed, slice_)
        try:
            question.derived()
        except UserError as error:
            trouble = trouble or error.what
            continue
        return DefaultSlice(question, _changes(resolved, question)), ""
    return None, trouble


def _variants(resolved: ResolvedJob, slice_: Slice) -> Iterator[ResolvedJob]:
    """Yield the job itself, then meshes with all devices on fsdp, with growing tensor parallelism.

    Tensor parallelism helps if the batch is too small for fsdp over all devices.
    """
    job = resolved.job
    yield resolved
    if slice_.devices < (job.devices or 1):
        return
    devices, context, expert = slice_.used_devices(job.devices), job.mesh.context, job.mesh.expert
    splits = dict.fromkeys((job.mesh.tp if job.mesh.tp > 0 else 1, *SPLITS))
    for tp in splits:
        if devices % (tp * context * expert):
            continue
        fsdp = devices // tp // context // expert
        share = job.batch // (fsdp * expert)
        if job.batch % (fsdp * expert):
            continue
        micro = job.micro_batch
        if micro is not None and share % micro:
            micro = next(n for n in range(min(micro, share), 0, -1) if share % n == 0)
        yield resolved.with_values(
            mesh=Mesh(data=1, fsdp=fsdp, tp=tp, context=context, expert=expert), micro_batch=micro
        )


def _changes(resolved: ResolvedJob, question: CompileRequest) -> tuple[str, ...]:
    """Return the overrides that turn the job into the one of the request."""
    changes = []
    shape = question.mesh_shape()
    try:
        same = CompileRequest(resolved, question.slice).mesh_shape() == shape
    except UserError:
        same = False
    if not same:
        changes.append(shape.overrides())
    if question.job.micro_batch != resolved.job.micro_batch:
        changes.append(f"micro_batch={question.job.micro_batch}")
    return tuple(changes)
