"""The program of `forerun cache`: a forward pass of a teacher, and the top-K logits that the cache stores.

The cache has the K most probable tokens at each position, and the mass of all other tokens (the tail). Logits are
stored relative to the highest one, in 16 bits: they are most exact near 0, where most of the probability is. The tail
is stored for each temperature at which the cache will be used, because it does not follow from the K logits.

As with the train step, the devices may be real ones or a topology description. B batch, S sequence, E embed, V vocab,
C chunk, K kept, N temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from forerun.hardware.mesh import MeshShape, resolve
from forerun.models.base import Model, Readout
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.nn.layers import soft_cap
from forerun.nn.sharding import batch_axes, by_hand, context_axis
from forerun.objectives.base import at_rest
from forerun.objectives.cross_entropy import chunk_length, in_chunks, logits_of
from forerun.objectives.distil import REST
from forerun.program import kernels
from forerun.program.build import make_mesh
from forerun.program.compiler_options import Value, compiler_options
from forerun.program.state import abstract_params
from forerun.resolve.resolved_job import ResolvedJob

Record = tuple[jax.Array, jax.Array, jax.Array]  # values_BSK float16, ids_BSK int32, tails_BSN float32


def record(out: Readout, *, vocab: int, top_k: int, temperatures: tuple[float, ...], chunk: int) -> Record:
    """Return the K highest logits of each position, their token ids, and the tails.

    The logits of all positions never exist at the same time.

    Args:
      out: the teacher's hidden states and read-out matrix. The matrix must not be split over the axis tp.
      vocab: number of tokens to consider, from the first on: those that the student has too.
      top_k: number of tokens to keep, K.
      temperatures: temperatures of the tails.
      chunk: positions whose logits exist at one time.
    """
    local = partial(_record_local, softcap=out.softcap, top_k=top_k, temperatures=temperatures, chunk=chunk)
    rows = P(batch_axes(), context_axis(out.hidden_BSE.shape[1]), None)
    kept: Record = by_hand(local, arguments=(rows, P(None, None)), results=(rows, rows, rows))(
        out.hidden_BSE, out.matrix_VE[:vocab]
    )
    return kept


def _record_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    *,
    softcap: float | None,
    top_k: int,
    temperatures: tuple[float, ...],
    chunk: int,
) -> Record:
    def one(_: None, hidden_BCE: jax.Array) -> tuple[None, Record]:
        logits_BCV = soft_cap(logits_of(hidden_BCE, matrix_VE), softcap)
        # A top_k is a sort and a slice, which XLA's CPU compiler replaces by a TopK routine. Without the barrier, it
        # first merges later slices of `highest_BCK` with that slice. It then misses the pattern and sorts all V logits.
        # One barrier for both results would end the process: XLA for several CPU devices then finds no tuple element.
        highest_BCK, ids_BCK = lax.top_k(logits_BCV, top_k)
        highest_BCK = lax.optimization_barrier(highest_BCK)
        tails = [_tail(logits_BCV, highest_BCK, temperature) for temperature in temperatures]
        values_BCK = (highest_BCK - highest_BCK[..., :1]).astype(jnp.float16)
        return None, (values_BCK, ids_BCK, jnp.stack(tails, axis=-1))

    _, pieces = lax.scan(one, None, in_chunks(hidden_BSE, chunk))
    B, S = hidden_BSE.shape[:2]
    arrays = [jnp.moveaxis(piece, 0, 1).reshape(B, -1, piece.shape[-1])[:, :S] for piece in pieces]
    return arrays[0], arrays[1], arrays[2]


def _tail(logits_BCV: jax.Array, highest_BCK: jax.Array, temperature: float) -> jax.Array:
    """Return the probability mass of all tokens except the K most probable.

    The mass is summed directly: 1 - (sum of the K) would lose a small tail to rounding. Tokens whose logit equals the
    last of the K are counted, except those that are among the K.
    """
    K = highest_BCK.shape[-1]
    first, last = highest_BCK[..., :1], highest_BCK[..., -1:]
    powers_BCV = jnp.exp((logits_BCV - first) / temperature)
    below = jnp.sum(jnp.where(logits_BCV < last, powers_BCV, jnp.float32(0)), axis=-1)
    equal = jnp.sum(logits_BCV >= last, axis=-1) - K
    below = below + equal.astype(jnp.float32) * jnp.exp((last - first) / temperature)[..., 0]
    return below / jnp.sum(powers_BCV, axis=-1)


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
