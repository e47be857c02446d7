from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.checkpoint.reader import Difference, SavedLeaf, first_difference, in_job_form, in_saved_form


def saved(shape: tuple[int, ...], dtype: Any = "float32") -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))


def test_equal_trees_have_no_difference_whatever_their_containers() -> None:
    job = {"a": (jnp.ones(2), None), "key": jax.random.key(0)}
    assert first_difference({"a": [saved((2,)), None], "key": saved((2,), "uint32")}, job) is None


def test_the_first_in_the_jobs_order_is_named() -> None:
    job = {"a": jnp.ones(2), "b": jnp.ones(3, jnp.bfloat16)}
    found = first_difference({"b": saved((4,)), "a": saved((1,)), "c": saved(())}, job)
    assert found == Difference("a", SavedLeaf((1,), "float32"), SavedLeaf((2,), "float32"))
    found = first_difference({"a": saved((2,)), "b": saved((3,))}, job)
    assert found == Difference("b", SavedLeaf((3,), "float32"), SavedLeaf((3,), "bfloat16"))


def test_leaves_of_one_side_only() -> None:
    assert first_difference({}, {"a": jnp.ones(2)}) == Difference("a", None, SavedLeaf((2,), "float32"))
    assert first_difference({"a": saved((2,))}, {}) == Difference("a", SavedLeaf((2,), "float32"), None)
    assert str(SavedLeaf((2, 3), "bfloat16")) == "bfloat16[2,3]"


def test_places_without_arrays_may_differ() -> None:
    """A newer version has more parameters that only one family has, and they are None in the others."""
    older = {"blocks": {"query": saved((2,)), "bias": None}, "moments": [saved(()), None]}
    job = {"blocks": {"query": "q", "gate": None}, "moments": ("m",), "tail": None}
    form = in_saved_form(older, job)
    assert form == {"blocks": {"query": "q", "bias": None}, "moments": ["m", None]}
    loaded = {"blocks": {"query": 1.0, "bias": None}, "moments": [2.0, None]}
    assert in_job_form(loaded, job) == {"blocks": {"query": 1.0, "gate": None}, "moments": (2.0,), "tail": None}
