"""Signum: momentum of which only the sign counts (Bernstein et al., 2018), as a custom optimizer."""

from __future__ import annotations

import optax

# --8<-- [start:optimizer]


def signum(learning_rate: optax.Schedule, momentum: float = 0.9, decay: float = 0.0) -> optax.GradientTransformation:
    """Return the optimizer. forerun passes `learning_rate`, the job's schedule; the rest are `optimizer.options`."""
    return optax.chain(
        optax.ema(momentum, debias=False),
        optax.scale_by_sign(),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(learning_rate),
    )


# --8<-- [end:optimizer]
