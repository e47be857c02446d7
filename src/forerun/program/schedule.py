"""Learning-rate schedule and weight decay as arguments of the step.

The values are not constants of the compiled program. Jobs that differ only in `optimizer.lr`, `optimizer.warmup`,
`optimizer.final_lr`, `optimizer.weight_decay` or `steps` therefore share one program. `optimizer.schedule` selects the
formula and is part of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.config.schema import Optimizer

# Keys of the job whose values are arguments of the program.
ARGUMENTS = ("steps", "optimizer.lr", "optimizer.warmup", "optimizer.final_lr", "optimizer.weight_decay")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Scalars that define the learning rate at every step, and the weight decay.

    Differences and quotients of the job's numbers are computed in float64 on the host and rounded once, as Optax does
    with Python floats.
    """

    lr: Any  # float32: peak
    warmup_start: Any  # float32: rate of the first step
    warmup_rise: Any  # float32: warmup_start - lr
    warmup_steps: Any  # int32
    decay_steps: Any  # int32: from the end of the warm-up to the last step
    final: Any  # float32: last rate
    fall: Any  # float32: lr - final
    final_share: Any  # float32: final / lr
    fall_share: Any  # float32: 1 - final_share
    weight_decay: Any  # float32

    @classmethod
    def of(cls, optimizer: Optimizer, steps: int, warmup_steps: int) -> Schedule:
        """Return the schedule of a job as NumPy scalars."""
        lr, final = optimizer.lr, optimizer.lr * optimizer.final_lr
        start = lr / max(1, warmup_steps)
        return cls(
            lr=np.float32(lr),
            warmup_start=np.float32(start),
            warmup_rise=np.float32(start - lr),
            warmup_steps=np.int32(warmup_steps),
            decay_steps=np.int32(max(1, steps - warmup_steps)),
            final=np.float32(final),
            fall=np.float32(lr - final),
            final_share=np.float32(optimizer.final_lr),
            fall_share=np.float32(1 - optimizer.final_lr),
            weight_decay=np.float32(optimizer.weight_decay),
        )

    @classmethod
    def abstract(cls, mesh: Mesh) -> Schedule:
        """Return shapes and shardings: every device has all values."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        counts = ("warmup_steps", "decay_steps")
        dtypes = {field.name: jnp.int32 if field.name in counts else jnp.float32 for field in fields(cls)}
        return cls(**{name: jax.ShapeDtypeStruct((), dtype, sharding=everywhere) for name, dtype in dtypes.items()})

    def on(self, mesh: Mesh) -> Schedule:
        """Return the values on the devices of `mesh`. Compiles nothing."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.make_array_from_callback((), everywhere, lambda _: np.asarray(x)), self)


def rate_at(shape: str, schedule: Schedule, step: Any, xp: Any = jnp) -> Any:
    """Return the learning rate at `step`, the number of steps taken before.

    Rises linearly from lr / warmup_steps to lr, then follows `shape`: constant, linear or cosine. The formulas are
    those of Optax's schedules, which do not accept traced values.

    Args:
      xp: `jax.numpy` inside a program, `numpy` on the host.
    """
    with jax.numpy_dtype_promotion("standard"):
        rate = _after_warmup(shape, schedule, step - schedule.warmup_steps, xp)
        rising = xp.maximum(1, schedule.warmup_steps - 1)
        left = 1 - xp.clip(step, 0, rising) / xp.float32(rising)
        warming = schedule.warmup_rise * left + schedule.lr
        return xp.asarray(xp.where(step < schedule.warmup_steps, warming, rate), xp.float32)


def _after_warmup(shape: str, schedule: Schedule, step: Any, xp: Any) -> Any:
    if shape == "constant":
        return schedule.lr
    done = xp.clip(step, 0, schedule.decay_steps)
    if shape == "linear":
        return schedule.fall * (1 - done / xp.float32(schedule.decay_steps)) + schedule.final
    assert shape == "cosine"
    wave = xp.float32(0.5) * (1 + xp.cos(xp.float32(np.pi) * done / xp.float32(schedule.decay_steps)))
    return schedule.lr * (schedule.fall_share * wave + schedule.final_share)
