from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.program.fingerprint import fingerprint

TYPES = (np.float32, jnp.bfloat16, np.float16, np.int32, np.int8)


def flipped(array: Any, place: int, bit: int) -> Any:
    raw = np.array(array)
    flat = raw.view(f"u{raw.dtype.itemsize}").reshape(-1)
    flat[place] ^= flat.dtype.type(1 << bit)
    return raw


@pytest.mark.parametrize("dtype", TYPES)
def test_every_flipped_bit_changes_it(dtype: Any) -> None:
    array = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    bits = 8 * array.dtype.itemsize
    changed = np.stack([flipped(array, place, bit) for place in range(array.size) for bit in range(bits)])
    seen = np.asarray(jax.jit(jax.vmap(fingerprint))(jnp.asarray(changed)))
    assert not (seen == np.asarray(fingerprint(jnp.asarray(array)))).any()


def test_it_knows_places_and_signs_of_zero() -> None:
    array = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)
    assert fingerprint(array) == fingerprint(jnp.copy(array))
    assert fingerprint(array) != fingerprint(array[::-1])
    assert fingerprint(array) != fingerprint(array[:, ::-1])
    assert fingerprint(array) != fingerprint(array[..., ::-1])
    assert fingerprint(jnp.zeros(3)) != fingerprint(-jnp.zeros(3))
    assert fingerprint(jnp.asarray(True)) != fingerprint(jnp.asarray(False))
