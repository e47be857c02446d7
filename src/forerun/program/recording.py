"""The program of `forerun cache`: a forward pass of a teacher, and the top-K logits that the cache stores.

As with the train step, the devices may be real ones or a topology description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.hardware.mesh import MeshShape, resolve
from forerun.models.base import Model
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.objectives.companion import at_rest
from forerun.objectives.cross_entropy import chunk_length
from forerun.objectives.distil import REST
from forerun.objectives.record import Record, record
from forerun.program import kernels
from forerun.program.build import make_mesh
from forerun.program.compiler_options import Value, compiler_options
from forerun.program.state import abstract_params
from forerun.resolve.resolved_job import ResolvedJob

Rows = dict[str, Any]  # tokens, segments and positions, each [B, S]
READ = ("tokens", "segments", "positions")


@dataclass(frozen=True)
class Recording:
    """A pure step of `forerun cache`, its abstract arguments with their shardings, and its FLOPs."""

    model: Model
    mesh: Mesh
    shape: MeshShape
    step: Callable[[Any, Rows], Record]
    params: Any
    rows: Rows
    flops_per_step: float
    tokens_per_step: int
    compiler_options: dict[str, Value]

    def trace(self) -> Any:
        """Return the traced step, ready to be lowered."""
        with jax.set_mesh(self.mesh):
            result = NamedSharding(self.mesh, PartitionSpec(sharding.batch_axes()))
            return jax.jit(self.step, out_shardings=result, keep_unused=True).trace(self.params, self.rows)


def cache_settings_of(resolved: ResolvedJob) -> tuple[int, int, tuple[float, ...]]:
    """Return the vocabulary, K and temperatures of the cache.

    Only tokens that the student and the teacher have in common are cached.
    """
    settings, teacher = resolved.job.method.teacher, resolved.teacher
    assert settings is not None
    assert teacher is not None
    common = min(resolved.vocab, teacher.vocab)
    temperature = settings.temperature
    return common, min(settings.top_k, common), (1.0,) if temperature == 1 else (1.0, temperature)


def recording_shape(devices: int, place: str = "this machine") -> MeshShape:
    """Return a mesh shape that uses fsdp only. With tp, the top-K of a split vocabulary would have to be merged."""
    return resolve(1, -1, 1, devices, place)


def build_recording(resolved: ResolvedJob, shape: MeshShape, devices: Sequence[Any]) -> Recording:
    """Return the program that computes a teacher's cached logits.

    Args:
      resolved: the job. Its `micro_batch` is the number of rows per device in one step.
      shape: the mesh.
      devices: real devices, or those of a topology description.
    """
    assert resolved.teacher is not None
    job, teacher, mesh = resolved.job, resolved.teacher.model, make_mesh(shape, devices)
    first = mesh.devices.flat[0]
    platform, kind = first.platform, first.device_kind
    compute = Compute(
        dtype=jnp.dtype(job.precision.compute),
        attention=kernels.job_attention(resolved, teacher, platform, kind, kernels.compute_capability(first)).kernel,
    )
    per_device = job.micro_batch or max(1, job.batch // shape.data_parallel)
    common, top_k, temperatures = cache_settings_of(resolved)
    chunk = job.loss_chunk or -(-chunk_length(job.sequence, per_device, common) // 2)
    count = per_device * shape.data_parallel

    def step(params: Any, rows: Rows) -> Record:
        out = teacher.apply(params, rows["tokens"], rows["segments"], rows["positions"], compute)
        return record(out, vocab=common, top_k=top_k, temperatures=temperatures, chunk=chunk)

    where = sharding.batched(mesh, (count, job.sequence), "BS")
    ids = jax.ShapeDtypeStruct((count, job.sequence), jnp.int32, sharding=where)
    return Recording(
        model=teacher,
        mesh=mesh,
        shape=shape,
        step=step,
        params=abstract_params(at_rest(teacher.specs(), REST), mesh),
        rows=dict.fromkeys(READ, ids),
        flops_per_step=teacher.flops_per_token(job.sequence) / 3 * count * job.sequence,
        tokens_per_step=count * job.sequence,
        compiler_options=compiler_options(platform, kind, shape, job.compiler_options).values,
    )
