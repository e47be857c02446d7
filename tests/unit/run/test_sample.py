from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from forerun.config.load import load
from forerun.config.schema import Sample
from forerun.generate.engine import Engine
from forerun.hardware.devices import choose
from forerun.models.base import Model
from forerun.program.build import Program
from forerun.resolve.resolve_model import resolve_model
from forerun.run.run_devices import program_on
from forerun.run.sample import NOT_FINITE, sample_text

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
    """The plain computation: all logits of exactly the tokens so far; a full window goes on with its second half."""
    known = ids

    @jax.jit
    def all_logits(tokens_BS: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens_BS.shape[1])[None]
        return program.model.apply(params, tokens_BS, jnp.ones_like(tokens_BS), positions, program.compute).logits()

    for _ in range(count):
        with jax.set_mesh(program.mesh):
            logits = all_logits(jnp.asarray([known], jnp.int32))
        chosen = int(np.argmax(np.asarray(logits)[0, -1]))
        ids, known = [*ids, chosen], [*known, chosen]
        if len(known) > SEQUENCE:
            known = known[-SEQUENCE // 2 :]
    return ids


@dataclass(frozen=True)
class Trained:
    program: Program
    params: Any


def on(devices: int, job_file: Path, *changes: str) -> Trained:
    """Weights large enough that their choices are not all the same token."""
    job = resolve_model(load(job_file, [f"devices={devices}", *changes]).job)
    program = program_on(job, choose("cpu", devices), None)
    params = program.method.objective.own(program.initial_state(3).params)
    return Trained(program, jax.tree.map(lambda leaf: leaf * 4 + 0.01, params))


class WithoutCache:
    """A model of one's own that has only what training needs."""

    def __init__(self, model: Model) -> None:
        self.vocab, self.heads = model.vocab, model.heads
        self.specs, self.apply, self.flops_per_token = model.specs, model.apply, model.flops_per_token


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


@pytest.mark.parametrize("change", ["lora.rank=4", "qat.group=16"])
def test_a_sample_of_adapters_and_of_rounded_weights_is_the_plain_argmax(change: str, job_file: Path) -> None:
    trained = on(1, job_file, change)
    sample = Sample(prompt="5 60 7", tokens=6, temperature=0.0)
    text = sample_text(trained.program, trained.params, Numbers(), sample, SEQUENCE, seed=0)
    assert text == Numbers().decode(greedy(trained.program, trained.params, [5, 60, 7], 6))


def test_a_sample_reads_its_prompt_once_and_decodes_the_rest(single: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("begin", "advance"):
        kept = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *args, kept=kept, name=name: (calls.update([name]), kept(*args))[1])
    monkeypatch.setattr(type(single.program.model), "apply", lambda *_: pytest.fail("a whole forward pass"))
    sample = Sample(prompt="5 60 7", tokens=SEQUENCE - 3, temperature=0.0)
    sample_text(single.program, single.params, Numbers(), sample, SEQUENCE, seed=0)
    assert calls == {"begin": 1, "advance": SEQUENCE - 4}


def test_a_model_without_a_cache_is_sampled_by_whole_passes(single: Trained) -> None:
    program = replace(single.program, model=cast(Model, WithoutCache(single.program.model)))
    sample = Sample(prompt="5 60 7", tokens=6, temperature=0.0)
    text = sample_text(program, single.params, Numbers(), sample, SEQUENCE, seed=0)
    assert text == Numbers().decode(greedy(single.program, single.params, [5, 60, 7], 6))


def test_weights_that_are_not_numbers_do_not_end_the_run_with_an_error(single: Trained) -> None:
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, single.params)
    sample = Sample(prompt="5 60 7", tokens=6, temperature=0.0)
    text = sample_text(single.program, broken, Numbers(), sample, SEQUENCE, seed=0)
    assert text == f"5 60 7 {NOT_FINITE}"
