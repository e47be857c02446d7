"""Build the Program of a job on a mesh. `plan` compiles the same Program that `train` runs.

`build` creates no arrays, so its mesh may consist of real devices or of a topology description.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.methods.method import MODEL, Method, method_of, model_specs
from forerun.methods.optimizer_parameters import group_numbers, layouts_of
from forerun.methods.requirements import eight_bit_weights, require_slices
from forerun.models.base import Model
from forerun.nn import sharding, spec
from forerun.nn.compute import Compute
from forerun.nn.weights.eight_bit import EightBitWeights
from forerun.objectives.base import Objective, Sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import chunk_length
from forerun.program import kernels, optimizer
from forerun.program.compiler_options import Value, compiler_options
from forerun.program.guard import Rule
from forerun.program.schedule import Schedule, rate_at
from forerun.program.state import State, abstract_params, abstract_state, started
from forerun.program.step import Step, make_step
from forerun.resolve.derive import Derived
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class Program:
    """A pure train step, its abstract arguments with their shardings, and its FLOPs."""

    model: Model
    compute: Compute
    mesh: Mesh
    step: Step
    evaluate: Callable[[Any, Batch[jax.Array]], Sums]
    method: Method
    started: Callable[[dict[str, Any], jax.Array], State]  # (arrays from files by name, random key) -> state at step 0
    given: dict[str, Any]  # the arrays that `started` takes, by name; ShapeDtypeStruct with shardings
    state: State  # ShapeDtypeStruct with shardings
    learning: Any  # the trainable part of the state's params; None in the other places
    unsaved: Any  # mask over the params: True where a resumed run reads the array from files
    batch: Batch[jax.ShapeDtypeStruct]
    schedule: Schedule  # NumPy scalars
    derived: Derived
    flops_per_step: float
    compiler_options: dict[str, Value]
    eight_bits: EightBitWeights | None = None  # the weights whose products have operands of 8 bits

    @property
    def tokens_per_step(self) -> int:
        return self.derived.tokens_per_step

    def trace(self) -> Any:
        """Return the traced step, ready to be lowered."""
        with jax.set_mesh(self.mesh):
            return self._jitted().trace(self.state, self.batch, self.schedule.abstract(self.mesh))

    def placed_schedule(self) -> Schedule:
        """Return the third argument of the step, on the program's devices."""
        return self.schedule.on(self.mesh)

    def _jitted(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        # The state is donated: the new state reuses its buffers, so only one copy of the state is in memory. The
        # output shardings are fixed, because the result must be a valid argument of the same executable.
        return jax.jit(self.step, donate_argnums=0, out_shardings=(shardings, replicated), keep_unused=True)

    def initial_state(self, seed: int, given: dict[str, Any] | None = None) -> State:
        """Return the state at step 0.

        The values do not depend on the mesh. Each array is created with its final sharding, so no device needs memory
        for a full copy.

        Args:
          seed: the seed of random weights.
          given: arrays that were read from files, by name. They are donated.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        with jax.set_mesh(self.mesh), warnings.catch_warnings():
            if self.method.resizes:  # the buffer of a matrix cannot be reused for a larger one
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            made = jax.jit(self.started, out_shardings=shardings, donate_argnums=0)
            return made(given or {}, jax.random.key(seed))

    def saved(self, state: State) -> State:
        """Return the part of a state (or of its abstract values) that a checkpoint contains."""
        return replace(state, params=spec.split(state.params, self.unsaved)[1])

    def resumed(self, saved: State, seed: int, given: dict[str, Any]) -> State:
        """Return the complete state from the part in a checkpoint and from arrays that were read from files.

        Args:
          saved: the restored part, as `saved` selects it.
          seed: the seed of the run, for arrays that neither a checkpoint nor a file contains.
          given: arrays that were read from files, by name. They are donated.
        """
        wanted = jax.tree.map(lambda leaf: leaf.sharding, spec.split(self.state.params, self.unsaved)[0])

        def rest(given: dict[str, Any], key: jax.Array) -> Any:
            return spec.split(self.started(given, key).params, self.unsaved)[0]

        with jax.set_mesh(self.mesh):
            made = jax.jit(rest, out_shardings=wanted, donate_argnums=0)(given, jax.random.key(seed))
        return replace(saved, params=spec.merge(made, saved.params))


def make_mesh(shape: MeshShape, devices: Any) -> Mesh:
    """Return a mesh of real devices or of a topology's devices.

    `tp` is the innermost axis: it communicates the most, so its devices are the closest neighbours.

    Raises:
      UserError: the devices are a part of a TPU slice that is not a box of its torus.
    """
    from jax.experimental import mesh_utils

    if shape.slices > 1:
        parts = [make_mesh(replace(shape, slices=1), part).devices for part in by_slice(devices, shape.slices)]
        names = (sharding.SLICE, *shape.sizes)
        return Mesh(np.stack(parts), names, axis_types=(AxisType.Auto,) * len(names))
    sizes = tuple(shape.sizes.values())
    try:
        grid = mesh_utils.create_device_mesh(sizes, devices=list(devices), allow_split_physical_axes=True)
    except AssertionError:  # JAX asserts that the chips of a TPU fill a box of its torus; 3 chips of 2 x 4 do not
        raise UserError(
            "E-PROGRAM-001",
            f"devices={shape.devices}: the first {shape.devices} devices of this TPU do not fill a rectangle",
            why="the devices of a mesh must be a box of the TPU's torus, so that neighbours are linked",
            fix="set devices=1, 2 or 4, or remove devices to use all of them",
        ) from None
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * len(sizes))


def by_slice(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the devices of each slice. Devices that do not know it, such as CPUs, are split in their order."""
    known: dict[int, list[Any]] = {}
    for device in devices:
        known.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(known) == count:
        return [known[index] for index in sorted(known)]
    size = len(devices) // count
    return [list(devices[start : start + size]) for start in range(0, len(devices), size)]


def program_of(resolved: ResolvedJob, shape: MeshShape, devices: Sequence[Any], rows: int | None = None) -> Program:
    """Return the Program of a job on `devices`, which may be real or those of a topology description.

    Args:
      resolved: the job. Its steps are filled in.
      shape: the mesh.
      devices: the devices of the mesh.
      rows: rows of an epoch, or None if the data was not read.

    Raises:
      UserError: the job cannot be split over the mesh, or names an attention kernel that does not run on the devices.
    """
    resolved.require_mesh(shape)
    return build(resolved, make_mesh(shape, devices), resolved.derived(shape, rows))


def build(resolved: ResolvedJob, mesh: Mesh, derived: Derived) -> Program:
    """Return the Program of a job.

    Args:
      resolved: the job. Its steps are filled in.
      mesh: real devices, or the devices of a topology description.
      derived: the numbers that follow from the job and the mesh, from `derive`.

    Raises:
      UserError: the job names an attention kernel that does not run on the devices.
    """
    job, model = resolved.job, resolved.model
    if job.unroll == "auto":
        raise ValueError("unroll: auto must be decided before the program is built")
    require_slices(resolved, derived.mesh.slices)
    first = mesh.devices.flat[0]
    platform, kind = first.platform, first.device_kind
    compute = Compute(
        dtype=jnp.dtype(job.precision.compute),
        attention=kernels.job_attention(resolved, model, platform, kind, kernels.compute_capability(first)).kernel,
        remat=job.remat,
        unroll=job.unroll is True,
        rope_by_product=kernels.rope_by_product(kind),
    )
    method = method_of(resolved, loss_chunk(resolved, derived, kind))
    before = model_specs(resolved)
    specs = method.specs(before)
    device_tokens = derived.micro_batch * job.sequence // derived.mesh.context
    eight_bits = eight_bit_weights(resolved, specs, platform, kind, device_tokens)
    schedule = Schedule.of(job.optimizer, derived.steps, derived.warmup_steps)
    trainable = spec.map_specs(lambda s: s.trainable, specs)
    decays, _ = spec.split(spec.map_specs(lambda s: s.decay, specs), trainable)
    layouts, _ = spec.split(layouts_of(specs), trainable)
    groups = None
    if job.optimizer.groups:
        groups, _ = spec.split(group_numbers(specs, job.optimizer.groups, resolved.model_facts.module_names), trainable)

    def tx_of(schedule: Schedule) -> optax.GradientTransformation:
        return optimizer.chain(job.optimizer, schedule, decays, layouts, groups, compute.dtype)

    tx = tx_of(schedule)  # for the state's structure, which does not depend on the schedule
    ema = job.optimizer.ema
    rule = Rule(job.guard.spike, job.guard.window)
    return Program(
        model=model,
        compute=compute,
        mesh=mesh,
        step=make_step(
            model,
            method.objective,
            compute,
            tx_of,
            partial(rate_at, job.optimizer.schedule),
            trainable,
            ema,
            rule,
            job.seed if method.drops else None,
            slice_dtypes(job.mesh.dcn_dtype, platform),
            eight_bits,
        ),
        evaluate=partial(evaluated, model, method.objective, compute),
        method=method,
        started=lambda given, key: started(
            tx, trainable, ema is not None, started_params(method, before, given, key), rule
        ),
        given={
            name: abstract_params(read, mesh)
            for name, read in {MODEL: method.reads(before), **method.objective.reads()}.items()
        },
        state=abstract_state(specs, tx, trainable, ema is not None, mesh, rule, layouts),
        learning=spec.split(abstract_params(specs, mesh), trainable)[0],
        unsaved=spec.map_specs(lambda s: not s.saved, specs),
        batch=abstract_batch(job.sequence, derived, mesh, method.objective),
        schedule=schedule,
        derived=derived,
        flops_per_step=method.flops_per_token(model, job.sequence) * derived.tokens_per_step,
        compiler_options=compiler_options(platform, kind, derived.mesh, job.compiler_options).values,
        eight_bits=eight_bits,
    )


def started_params(method: Method, specs: Any, given: dict[str, Any], key: jax.Array) -> Any:
    """Return the method's parameters, from the model's weights in `given` or from random ones."""
    own = given[MODEL] if MODEL in given else method.fresh(specs, key)
    return method.start(specs, own, given, key)


def evaluated(model: Model, objective: Objective, compute: Compute, params: Any, batch: Batch[jax.Array]) -> Sums:
    """Return the objective's sums over one batch [1, B, S], without a gradient."""
    return sharding.summed_over_slices(
        lambda params, batch: objective(model, params, jax.tree.map(lambda x: x[0], batch), compute), (params, batch)
    )


def slice_dtypes(dcn_dtype: str, platform: str) -> tuple[Any, Any]:
    """Return the dtype to which gradients between slices are rounded, and the dtype in which they are summed.

    XLA for CPU aborts on a bfloat16 sum in a partly manual mesh (jax 0.10.2), so virtual slices sum in float32.
    """
    rounded = jnp.dtype(dcn_dtype)
    return rounded, jnp.dtype(jnp.float32) if platform == "cpu" else rounded


def loss_chunk(resolved: ResolvedJob, derived: Derived, device_kind: str) -> int:
    """Return how many positions have logits in memory at one time: the job's `loss_chunk`, or a default."""
    job = resolved.job
    own_positions = job.sequence // derived.mesh.context  # of a sequence on one device
    return job.loss_chunk or chunk_length(
        own_positions, derived.micro_batch, resolved.model.vocab, kernels.logits_bytes(device_kind)
    )


def abstract_batch(sequence: int, derived: Derived, mesh: Mesh, objective: Objective) -> Batch[jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of a batch: [A, B, S] for A micro-batches of B rows on all devices."""
    rows = derived.micro_batch * derived.mesh.data_parallel

    def placed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        full = (derived.accumulation, *shape)
        by_position = len(shape) > 1 and shape[1] == sequence  # other arrays have values for each row
        where = sharding.batched(mesh, full, "AB" + ("S" if by_position else ".") * (len(shape) - 1))
        return jax.ShapeDtypeStruct(full, dtype, sharding=where)

    extras = objective.extras(rows, sequence)
    ids = placed((rows, sequence), jnp.int32)
    weights = placed((rows, sequence), jnp.float32)
    return Batch(ids, ids, weights, ids, ids, {name: placed(like.shape, like.dtype) for name, like in extras.items()})


def program_hash(lowered: Any) -> str:
    """Return a hash of the lowered program, as 12 hex digits. Source locations are ignored."""
    text = re.sub(r"loc\(.*?\)", "", lowered.as_text())
    return hashlib.sha256(text.encode()).hexdigest()[:12]
