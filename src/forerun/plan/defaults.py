"""Which slices are worth a compile when the user names none: the smallest that might hold the job, and the next.

By formula only. What must lie in HBM whatever the compiler does: weights, optimizer, gradients, and the layer
inputs that even full remat keeps. A slice with less than that is not asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config.schema import Job, Mesh, Remat
from forerun.errors import UserError
from forerun.hardware.slices import Slice, slices
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.plan.question import Question
from forerun.plan.verdict import Verdict
from forerun.units import GIB, Bytes

MOST_COMPILES = 8
GENERATIONS = ("v6e", "v5e", "v5p", "v4", "tpu7x")  # in the order in which they are asked
OLD = ("v3", "v2")  # for small jobs only
SMALL_BYTES = 8 * GIB
LARGEST_CHIPS = 1024
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
SPLITS = (1, 2, 4, 8)
WIDE_BATCH = 256


@dataclass(frozen=True)
class Candidate:
    """`changes` are what the job needed to be laid out on the slice, as overrides; mostly nothing."""

    question: Question
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """For each generation the slices that might hold the job, smallest first; and why others are left out."""

    by_generation: dict[str, list[Candidate]]
    left_out: tuple[str, ...]

    def first(self) -> list[Candidate]:
        return [own[0] for own in self.by_generation.values()]

    def second(self, verdicts: Sequence[Verdict]) -> list[Candidate]:
        """The next larger slices: first where the smallest turned out too small, then in the usual order."""
        fits = {v.question.slice.chip.name: v.fits for v in verdicts}
        order = sorted(self.by_generation, key=lambda name: fits.get(name, False))  # stable
        more = [self.by_generation[name][1] for name in order if len(self.by_generation[name]) > 1]
        return more[: max(0, MOST_COMPILES - len(verdicts))]

    def notes(self, compiled: Sequence[Candidate]) -> list[str]:
        """How the comparison came about, for people: what was changed and what was left out."""
        names = {one.question.slice.name for one in compiled}
        rest = [one for own in self.by_generation.values() for one in own if one.question.slice.name not in names]
        notes = [f"left out: {why}" for why in self.left_out]
        if rest:
            listed = ", ".join(one.question.slice.name for one in rest)
            notes.append(f"not compiled, to answer soon: {listed}")
        if plain := ",".join(one.question.slice.name for one in rest if not one.changes):
            notes[-1] += f"; ask with --on {plain}"
        return notes


def sensible(job: Job) -> Choice:
    """The slices of every generation that are worth a compile for this job, which is concrete."""
    needs = Needs.of(job)
    chosen: dict[str, list[Candidate]] = {}
    left_out: list[str] = []
    small = needs.state_bytes + needs.gradient_bytes <= SMALL_BYTES
    for generation in (*GENERATIONS, *(OLD if small else ())):
        own, why = _of_generation(job, generation, needs)
        if own and len(chosen) < MOST_COMPILES:
            chosen[generation] = own
        else:
            left_out.append(f"{generation} ({why})")
    if not small:
        resting = Bytes(needs.state_bytes + needs.gradient_bytes)
        left_out.append(f"v2 and v3 (for small jobs only; weights, optimizer and gradients are {resting})")
    if not chosen:
        raise UserError(
            "no slice of any generation can be laid out for this job",
            why="; ".join(left_out),
            fix=_way_out(job, needs),
        )
    return Choice(chosen, tuple(left_out))


def _way_out(job: Job, needs: Needs) -> str:
    """The mildest change with which some slice might hold the job, by the same formulas."""
    wider = -(-job.batch // WIDE_BATCH) * WIDE_BATCH
    changes: list[tuple[str, dict[str, Any]]] = [("micro_batch=1", {"micro_batch": 1})]
    changes.append((f"batch={wider} micro_batch=1", {"batch": wider, "micro_batch": 1}))
    if not is_plugin(job.model):
        remat = {"remat": Remat(policy="named", offload=("layer_in",))}
        more = [
            (f"{words} 'remat={{policy: named, offload: [layer_in]}}'", change | remat) for words, change in changes
        ]
        changes = [changes[0], more[0], changes[1], more[1]]
    for words, change in changes:
        changed = job.model_copy(update=change)
        changed_needs = Needs.of(changed)
        for generation in GENERATIONS:
            own, _ = _of_generation(changed, generation, changed_needs)
            if own:
                return f"with {' '.join((words, *own[0].changes))} it might fit: --on {own[0].question.slice.name}"
    known = [one for one in slices() if one.chips <= LARGEST_CHIPS]
    room, name = max((one.devices * (one.chip.usable_bytes or 0), one.name) for one in known)
    resting = needs.state_bytes + needs.gradient_bytes
    if resting > room:
        return (
            f"make the model smaller: its weights, optimizer and gradients are {resting / room:.3g} x all HBM of {name}"
        )
    return "make the sequence shorter or the model smaller; a batch that divides by 256 leaves the most slices"


@dataclass(frozen=True)
class Needs:
    """Bytes of the whole job: the state and the gradients are split over fsdp x tp."""

    state_bytes: int
    gradient_bytes: int
    layer_input_bytes_per_sequence: int  # 0 for a model of the user's own: not known

    @classmethod
    def of(cls, job: Job) -> Needs:
        from forerun.methods.sizes import resting

        sizes, inputs = resting(job), 0
        if not is_plugin(job.model) and "layer_in" not in job.remat.offload:
            config = config_of(job.model)
            inputs = config.layers * job.sequence * config.embed * FLOAT_BYTES[job.precision.compute]
        return cls(sizes.state_bytes, sizes.gradient_bytes, inputs)

    def per_device_bytes(self, question: Question) -> float:
        mesh, job = question.mesh_shape(), question.job
        micro = job.micro_batch or job.batch // mesh.data_parallel
        shards = mesh.fsdp * mesh.tp
        return (self.state_bytes + self.gradient_bytes) / shards + micro * self.layer_input_bytes_per_sequence


def _of_generation(job: Job, generation: str, needs: Needs) -> tuple[list[Candidate], str]:
    """At most two slices, or the reason why there is none."""
    own: list[Candidate] = []
    why = f"its largest slice here has {LARGEST_CHIPS} chips"
    for one in slices():
        if one.chip.name != generation or one.chips > LARGEST_CHIPS:
            continue
        candidate, trouble = _laid_out(job, one)
        if candidate is None:
            why = f"{one.name}: {trouble}"
            continue
        needed, usable = needs.per_device_bytes(candidate.question), one.chip.usable_bytes or 0
        if needed > usable:
            why = f"{one.name} would need at least {Bytes(needed)} a device and has {Bytes(usable)}"
            continue
        own.append(candidate)
        if len(own) == 2:
            break
    return own, why


def _laid_out(job: Job, slice_: Slice) -> tuple[Candidate | None, str]:
    """The job on the slice: as it is, or with the nearest mesh that keeps its batch."""
    heads = None if is_plugin(job.model) else config_of(job.model).heads
    trouble = ""
    for changed in _variants(job, slice_):
        question = Question(changed, slice_)
        try:
            question.derived(heads)
        except UserError as error:
            trouble = trouble or error.what
            continue
        return Candidate(question, _changes(job, question)), ""
    return None, trouble


def _variants(job: Job, slice_: Slice) -> Iterator[Job]:
    """The job itself; then all devices on fsdp, with a little tensor parallelism if the batch is too small."""
    yield job
    if slice_.devices < (job.devices or 1):
        return
    devices = slice_.used_devices(job.devices)
    splits = dict.fromkeys((job.mesh.tp if job.mesh.tp > 0 else 1, *SPLITS))
    for tp in splits:
        if devices % tp:
            continue
        fsdp = devices // tp
        share = job.batch // fsdp
        if job.batch % fsdp:
            continue
        micro = job.micro_batch
        if micro is not None and share % micro:
            micro = next(n for n in range(min(micro, share), 0, -1) if share % n == 0)
        yield job.model_copy(update={"mesh": Mesh(data=1, fsdp=fsdp, tp=tp), "micro_batch": micro})


def _changes(job: Job, question: Question) -> tuple[str, ...]:
    changes = []
    shape = question.mesh_shape()
    try:
        same = Question(job, question.slice).mesh_shape() == shape
    except UserError:
        same = False
    if not same:
        changes.append(shape.overrides())
    if question.job.micro_batch != job.micro_batch:
        changes.append(f"micro_batch={question.job.micro_batch}")
    return tuple(changes)
