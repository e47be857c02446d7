from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from forerun.config.load import load
from forerun.config.schema import Sample
from forerun.hardware.devices import choose
from forerun.loop.concrete import concrete
from forerun.loop.sample import sample_text
from forerun.loop.train import program_on
from forerun.program.build import Program

SEQUENCE = 16
PROMPT = [5, 60, 7, 80, 9, 100, 11, 120, 13, 140, 15, 160, 17]


class Numbers:
    """Text is numbers with spaces, so that nothing of the ids is hidden by decoding."""

    name, vocab = "numbers", 384

    def __init__(self, eos: int = -1) -> None:
        self.eos = eos

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.asarray(text.split(), np.int32)

    def decode(self, ids: ArrayLike) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


def greedy(program: Program, params: Any, ids: list[int], count: int) -> list[int]:
    """The plain computation: all logits of exactly the tokens so far, no window, no filling."""

    @jax.jit
    def all_logits(tokens_BS: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens_BS.shape[1])[None]
        return program.model.apply(params, tokens_BS, jnp.ones_like(tokens_BS), positions, program.compute).logits()

    for _ in range(count):
        with jax.set_mesh(program.mesh):
            logits = all_logits(jnp.asarray([ids[-SEQUENCE:]], jnp.int32))
        ids = [*ids, int(np.argmax(np.asarray(logits)[0, -1]))]
    return ids


@dataclass(frozen=True)
class Trained:
    program: Program
    params: Any


def on(devices: int, job_file: Path) -> Trained:
    """Weights large enough that their choices are not all the same token."""
    job = concrete(load(job_file, [f"devices={devices}"]).job)
    program = program_on(job, choose("cpu", devices), None)
    return Trained(program, jax.tree.map(lambda leaf: leaf * 4, program.initial_state(3).params))


@pytest.fixture(scope="module")
def single(job_file: Path) -> Trained:
    return on(1, job_file)


@pytest.fixture(scope="module")
def expected(single: Trained) -> list[int]:
    return greedy(single.program, single.params, PROMPT, 9)


@pytest.mark.parametrize("devices", [1, 4])
def test_greedy_is_the_plain_argmax_even_past_the_window(expected: list[int], devices: int, job_file: Path) -> None:
    many = on(devices, job_file)
    sample = Sample(prompt=Numbers().decode(PROMPT), tokens=9, temperature=0.0)
    text = sample_text(many.program, many.params, Numbers(), sample, SEQUENCE, seed=0)
    assert len(expected) > SEQUENCE
    assert len(set(expected[len(PROMPT) :])) > 2, "a constant would prove little"
    assert text == Numbers().decode(expected)


def test_the_end_of_a_document_ends_the_sample(single: Trained, expected: list[int]) -> None:
    sample = Sample(prompt=Numbers().decode(PROMPT), tokens=9, temperature=0.0)
    first = len(PROMPT)
    text = sample_text(single.program, single.params, Numbers(eos=expected[first]), sample, SEQUENCE, seed=0)
    assert text == Numbers().decode(expected[: first + 1])


def test_the_seed_decides_a_sample_with_temperature(single: Trained) -> None:
    sample = Sample(prompt="5 60 7", tokens=8, temperature=3.0)
    first, again, other = (
        sample_text(single.program, single.params, Numbers(), sample, SEQUENCE, seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
