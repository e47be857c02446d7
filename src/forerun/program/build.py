"""A job on a mesh becomes one Program, which `plan` compiles and `train` runs.

`build` works on real devices and on topology descriptions alike: nothing in it touches an array.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model
from forerun.nn import sharding, spec
from forerun.nn.compute import Compute
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import chunk_length
from forerun.objectives.next_token import NextToken, Objective
from forerun.program import kernels, optimizer
from forerun.program.derive import Derived
from forerun.program.state import Metrics, State, abstract_state, initial_state, started
from forerun.program.step import make_step


@dataclass(frozen=True)
class Program:
    """A pure step, its abstract arguments with their shardings, and what it costs."""

    model: Model
    compute: Compute
    mesh: Mesh
    step: Callable[[State, Batch[jax.Array]], tuple[State, Metrics]]
    initial: Callable[[jax.Array], State]
    started: Callable[[Any], State]
    state: State  # of ShapeDtypeStruct with shardings
    batch: Batch[jax.ShapeDtypeStruct]
    derived: Derived
    flops_per_step: float
    compiler_options: dict[str, str]

    def trace(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self._jitted().trace(self.state, self.batch)

    def _jitted(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        metrics = Metrics(loss=replicated, grad_norm=replicated, lr=replicated, tokens=replicated)
        return jax.jit(self.step, donate_argnums=0, out_shardings=(shardings, metrics), keep_unused=True)

    def initial_state(self, seed: int) -> State:
        """Fresh arrays, each made where it will live. The same numbers on every mesh."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        with jax.set_mesh(self.mesh):
            return jax.jit(self.initial, out_shardings=shardings)(jax.random.key(seed))

    def state_with(self, params: Any) -> State:
        """Step 0 with weights that are there already; they are given away."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        with jax.set_mesh(self.mesh):
            return jax.jit(self.started, out_shardings=shardings, donate_argnums=0)(params)


def make_mesh(shape: MeshShape, devices: Any) -> Mesh:
    """`devices` are real ones or a topology's; tp neighbours are nearest."""
    from jax.experimental import mesh_utils

    sizes = (shape.data, shape.fsdp, shape.tp)
    grid = mesh_utils.create_device_mesh(sizes, devices=list(devices), allow_split_physical_axes=True)
    return Mesh(grid, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def build(job: Job, model: Model, mesh: Mesh, derived: Derived) -> Program:
    platform, kind = mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind
    compute = Compute(
        dtype=jnp.dtype(job.precision.compute),
        attention=kernels.attention(job.attention, platform, kind, job.precision.compute, model),
        remat=job.remat,
    )
    specs = spec.cast(model.specs(), jnp.dtype(job.precision.params))
    rate = optimizer.schedule(job.optimizer, derived.steps, derived.warmup_steps)
    trainable = spec.map_specs(lambda s: s.trainable, specs)
    decays, _ = spec.split(spec.map_specs(lambda s: s.decay, specs), trainable)
    tx = optimizer.chain(job.optimizer, rate, decays)
    objective: Objective = NextToken(loss_chunk(job, model, derived))
    ema = job.optimizer.ema
    return Program(
        model=model,
        compute=compute,
        mesh=mesh,
        step=make_step(model, objective, compute, tx, rate, trainable, ema),
        initial=partial(initial_state, specs, tx, trainable, ema is not None),
        started=partial(started, tx, trainable, ema is not None),
        state=abstract_state(specs, tx, trainable, ema is not None, mesh),
        batch=abstract_batch(job, derived, mesh),
        derived=derived,
        flops_per_step=model.flops_per_token(job.sequence) * derived.tokens_per_step,
        compiler_options=kernels.compiler_options(platform, kind),
    )


def loss_chunk(job: Job, model: Model, derived: Derived) -> int:
    """Positions whose logits exist at one time: the job's, or what keeps a device's logits small."""
    return job.loss_chunk or chunk_length(job.sequence, derived.micro_batch, model.vocab)


def abstract_batch(job: Job, derived: Derived, mesh: Mesh) -> Batch[jax.ShapeDtypeStruct]:
    shape = (derived.accumulation, derived.micro_batch * derived.mesh.data_parallel, job.sequence)
    where = sharding.batched(mesh, shape, "ABS")
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    return Batch(ids, ids, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where), ids, ids)


def program_hash(lowered: Any) -> str:
    """Twelve hex digits of the lowered program: equal programs, equal hashes. Source positions do not count."""
    text = re.sub(r"loc\(.*?\)", "", lowered.as_text())
    return hashlib.sha256(text.encode()).hexdigest()[:12]
