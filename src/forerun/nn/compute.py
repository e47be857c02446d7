"""Settings of how a model is computed: dtype, attention kernel, remat policy and loop over the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forerun.config.schema import Remat
from forerun.nn.attention import Kernel
from forerun.nn.weights.eight_bit import PRODUCT

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Compute:
    """How to compute a model: an argument of every `apply`. It changes results only by rounding."""

    dtype: Any = jnp.float32
    attention: Kernel = Kernel("xla")
    remat: Remat = Remat()
    unroll: bool = False  # run the layers one after the other instead of in a scan
    rope_by_product: bool = False  # exchange the halves of heads by a matrix product (`nn/rotation.py`)

    def checkpointed(self, layer: F, *, in_order: bool = False) -> F:
        """Return `layer` with the remat policy applied, or `layer` itself for the policy "none".

        The backward pass then recomputes every intermediate value that the policy does not keep. With `in_order`, it
        starts with a layer only when it has the gradient of the layer's output.
        """
        policies = jax.checkpoint_policies
        if self.remat.policy == "none":
            return layer
        policy = None
        if self.remat.policy == "dots":
            policy = _keeps_product
        elif self.remat.policy == "named":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.remat.keep),
                names_which_can_be_offloaded=list(self.remat.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # Inside a scan, forward and backward pass are separate loops, which XLA cannot merge. Without a scan, it would
        # find that the backward pass computes the same values again, and keep them instead. A scan over several layers
        # at a time may gather the weights of all of them together, unless they are computed in order.
        return jax.checkpoint(layer, policy=policy, prevent_cse=self.unroll or in_order)  # type: ignore[return-value]


def _keeps_product(primitive: Any, *operands: Any, **settings: Any) -> Any:
    """Return whether the policy "dots" keeps a result. Of a product of 8 bits, it keeps the scaled result.

    The sums before scaling have 32 bits, which would be twice the memory of bfloat16.
    """
    if primitive.name == "name":
        return settings["name"] == PRODUCT
    if any(operand.dtype.itemsize == 1 for operand in operands if hasattr(operand, "dtype")):
        return False
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **settings)


def residual(x: jax.Array, name: str) -> jax.Array:
    """Return `x` with a name that the job's `remat.keep` and `remat.offload` can refer to."""
    return checkpoint_name(x, name)


# ---- Length buckets: rounding lengths up to a few values, so that one compiled program serves many lengths ----


def length_bucket(length: int, shortest: int) -> int:
    """Return the smallest bucket that is at least `length`.

    The buckets are 1, 1.5, 2, 3, 4, 6, ... times `shortest`, so at most a third of a bucket above `shortest` is empty.
    """
    bucket = shortest
    while bucket < length:
        if bucket * 3 // 2 >= length:
            return bucket * 3 // 2
        bucket *= 2
    return bucket
