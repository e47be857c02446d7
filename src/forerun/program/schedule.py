"""Learning-rate schedule, weight decay and the numbers of parameter groups as arguments of the step.

The values are not constants of the compiled program. Jobs that differ only in `steps` or in the numbers of the schedule
(`optimizer.lr`, `optimizer.warmup`, `optimizer.weight_decay`, ...) therefore share one program. `optimizer.schedule`
selects the formula and is part of the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.config.schema import Optimizer
from forerun.resolve.derive import fall_steps

# Keys of the job whose values are arguments of the program.
ARGUMENTS = (
    "steps",
    "optimizer.lr",
    "optimizer.warmup",
    "optimizer.final_lr",
    "optimizer.decay",
    "optimizer.power",
    "optimizer.cycles",
    "optimizer.weight_decay",
)
TIMESCALE = 10_000  # steps after which inverse_sqrt without a warm-up falls to 1 / sqrt(2), as in transformers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupRates:
    """The numbers of one parameter group."""

    lr_scale: Any  # float32
    weight_decay: Any | None  # float32; None: as the other parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Scalars that define the learning rate at every step, and the weight decay.

    Differences and quotients of the job's numbers are computed in float64 on the host and rounded once, as Optax does
    with Python floats. Fields that the job's schedule does not need are None, so they are no arguments of its program.
    """

    lr: Any  # float32: peak
    warmup_start: Any  # float32: rate of the first step
    warmup_rise: Any  # float32: warmup_start - lr
    warmup_steps: Any  # int32
    decay_steps: Any  # int32: from the end of the warm-up (with wsd: of the stable phase) to the last step
    final: Any  # float32: last rate
    fall: Any  # float32: lr - final
    final_share: Any  # float32: final / lr
    fall_share: Any  # float32: 1 - final_share
    weight_decay: Any  # float32
    stable_steps: Any | None = None  # int32: steps of wsd between the warm-up and the fall
    power: Any | None = None  # float32: exponent of polynomial
    cycles: Any | None = None  # int32: number of cosines of cosine_restarts
    timescale: Any | None = None  # float32: steps of inverse_sqrt
    groups: tuple[GroupRates, ...] = ()

    @classmethod
    def of(cls, optimizer: Optimizer, steps: int, warmup_steps: int) -> Schedule:
        """Return the schedule of a job as NumPy scalars."""
        share = 1.0 if optimizer.final_lr is None else optimizer.final_lr
        lr, final = optimizer.lr, optimizer.lr * share
        start = lr / max(1, warmup_steps)
        falls = fall_steps(optimizer, steps, warmup_steps)
        shape = optimizer.schedule
        return cls(
            lr=np.float32(lr),
            warmup_start=np.float32(start),
            warmup_rise=np.float32(start - lr),
            warmup_steps=np.int32(warmup_steps),
            decay_steps=np.int32(max(1, falls)),
            final=np.float32(final),
            fall=np.float32(lr - final),
            final_share=np.float32(share),
            fall_share=np.float32(1 - share),
            weight_decay=np.float32(optimizer.weight_decay or 0.0),
            stable_steps=np.int32(steps - warmup_steps - falls) if shape == "wsd" else None,
            power=np.float32(optimizer.power) if optimizer.power is not None else None,
            cycles=np.int32(optimizer.cycles) if optimizer.cycles is not None else None,
            timescale=np.float32(warmup_steps or TIMESCALE) if shape == "inverse_sqrt" else None,
            groups=tuple(
                GroupRates(
                    np.float32(group.lr_scale),
                    None if group.weight_decay is None else np.float32(group.weight_decay),
                )
                for group in optimizer.groups
            ),
        )

    def abstract(self, mesh: Mesh) -> Schedule:
        """Return shapes and shardings: every device has all values."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=everywhere), self)

    def on(self, mesh: Mesh) -> Schedule:
        """Return the values on the devices of `mesh`. Compiles nothing."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.make_array_from_callback((), everywhere, lambda _: np.asarray(x)), self)


def rate_at(shape: str, schedule: Schedule, step: Any, xp: Any = jnp) -> Any:
    """Return the learning rate at `step`, the number of steps taken before.

    Rises linearly from lr / warmup_steps to lr, then follows `shape`. The formulas are those of Optax's schedules,
    which do not accept traced values, or of transformers if Optax has none.

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
    if shape == "inverse_sqrt":
        return schedule.lr / xp.sqrt((xp.maximum(step, 0) + schedule.timescale) / schedule.timescale)
    if shape == "wsd":
        step = step - schedule.stable_steps
    done = xp.clip(step, 0, schedule.decay_steps)
    if shape in ("linear", "wsd"):
        return schedule.fall * (1 - done / xp.float32(schedule.decay_steps)) + schedule.final
    if shape == "polynomial":
        return schedule.fall * (1 - done / xp.float32(schedule.decay_steps)) ** schedule.power + schedule.final
    if shape == "cosine_restarts":
        # In integers: a quotient that is rounded down would put the first step of a cycle at the end of the last one.
        done = xp.where(done < schedule.decay_steps, done * schedule.cycles % schedule.decay_steps, done)
    else:
        assert shape == "cosine"
    wave = xp.float32(0.5) * (1 + xp.cos(xp.float32(np.pi) * done / xp.float32(schedule.decay_steps)))
    return schedule.lr * (schedule.fall_share * wave + schedule.final_share)
