from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny_models as tiny
from error_assertions import raises_error
from tiny_models import EIGHT, MODELS, ONE, POSITIONS, VOCAB, generated, prompts, recomputed, settings

from forerun.errors import UserError
from forerun.generate.engine import Engine, Settings, prompt_chunks, row_bucket
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model
from forerun.nn.compute import Compute

LENGTHS = (5, 1, 30)


@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_whole_forward_passes(name: str, shape: MeshShape) -> None:
    rows = prompts(*LENGTHS)
    expected = [recomputed(name, prompt, 64) for prompt in rows]
    assert len({tuple(tokens) for tokens in expected}) == len(rows), "the rows must differ to prove anything"
    assert all(len(set(tokens)) > 8 for tokens in expected), "the model must not repeat one token"
    assert generated(tiny.engine(name, shape), rows, settings(64)) == expected


def test_a_cache_that_is_outgrown_is_copied_into_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.generate.stream.ROOM", 1)
    engine = tiny.fresh_engine("decoder", ONE)
    rows = prompts(60, 3)
    assert generated(engine, rows, settings(80)) == [recomputed("decoder", prompt, 80) for prompt in rows]
    assert engine.read._cache_size() == 1
    # 60 + 79 fed tokens: caches of 64, 96, 128 and 192 places
    assert engine.step._cache_size() == 4


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.generate.engine.CHUNK", 64)
    engine = tiny.fresh_engine("decoder", ONE)
    rows = prompts(150, 64, 65, 7)
    assert generated(engine, rows, settings(20)) == [recomputed("decoder", prompt, 20) for prompt in rows]
    assert engine.read._cache_size() == 2  # the first chunk, which needs no cache, and the others


def test_each_bucket_compiles_once() -> None:
    engine = tiny.fresh_engine("decoder", ONE)

    def compiled() -> tuple[int, int]:
        return engine.read._cache_size(), engine.step._cache_size()

    for length in (5, 40, 60, 33, 50):
        generated(engine, prompts(length), settings(20))
    assert compiled() == (2, 2)  # caches of 64 and 96 places
    generated(engine, prompts(5, 5, 5), settings(20))
    generated(engine, prompts(9, 5, 5, 7), settings(20))
    assert compiled() == (3, 3)  # four rows
    for temperature in (0.5, 0.9):
        generated(engine, prompts(5), Settings(20, Sampling(temperature, top_k=4)))
    assert compiled() == (4, 4)


@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=str)
def test_sampled_rows_depend_on_the_seed_and_not_on_their_neighbours(shape: MeshShape) -> None:
    engine = tiny.engine("decoder", shape)
    wanted = Settings(40, Sampling(1.0, top_k=20, top_p=0.95), seed=7)
    rows = prompts(*LENGTHS)
    together = generated(engine, rows, wanted)
    assert together == generated(engine, rows, wanted)
    assert together == [generated(engine, [prompt], wanted, first_row=row)[0] for row, prompt in enumerate(rows)]
    assert together != generated(engine, rows, Settings(40, wanted.sampling, seed=8))
    twins = generated(engine, [rows[0], rows[0]], wanted)
    assert twins[0] != twins[1]


def test_sampled_tokens_are_the_same_on_every_mesh() -> None:
    wanted = Settings(40, Sampling(1.0, top_p=0.9), seed=1)
    rows = prompts(*LENGTHS)
    assert generated(tiny.engine("gpt2", ONE), rows, wanted) == generated(tiny.engine("gpt2", EIGHT), rows, wanted)


def test_eos_ends_a_row_and_is_not_given_out() -> None:
    rows = prompts(*LENGTHS)
    plain = generated(tiny.engine("decoder", ONE), rows, settings(64))
    end = plain[0][10]
    stream = Stream(tiny.engine("decoder", ONE, frozenset({end})), rows, settings(64))
    steps = list(stream)
    for row, tokens in enumerate(plain):
        cut = tokens.index(end) if end in tokens else 64
        assert [step[row] for step in steps if step[row] is not None] == tokens[:cut]
        assert stream.finish[row] == ("eos" if end in tokens else "length")


def test_a_row_that_is_stopped_leaves_the_others_alone() -> None:
    rows = prompts(*LENGTHS)
    engine = tiny.engine("decoder", ONE)
    plain = generated(engine, rows, settings(30))
    stream, found = Stream(engine, rows, settings(30)), [[] for _ in rows]
    for number, step in enumerate(stream):
        for row, token in enumerate(step):
            if token is not None:
                found[row].append(token)
        if number == 4:
            stream.stop(0)
        if number == 9:
            stream.stop(2)
    assert found == [plain[0][:5], plain[1], plain[2][:10]]
    assert stream.finish == ["stopped", "length", "stopped"]


def test_learned_positions_end_a_row() -> None:
    rows = prompts(POSITIONS - 3, POSITIONS, 4)
    stream = Stream(tiny.engine("gpt2", ONE), rows, settings(10))
    steps = list(stream)
    counts = [sum(step[row] is not None for step in steps) for row in range(3)]
    assert counts == [4, 1, 10]  # the last one is said, though it can no longer be read
    assert stream.finish == ["length"] * 3
    assert [step[0] for step in steps[:4]] == recomputed("gpt2", rows[0], 4)


@pytest.mark.parametrize(
    ("name", "prompt", "what"),
    [
        ("decoder", [], "E-GENERATE-002"),
        ("gpt2", [1] * (POSITIONS + 1), rf"{POSITIONS + 1}.*E-GENERATE-003"),
        ("decoder", [1, 64], r"64.*E-GENERATE-004"),
    ],
)
def test_prompts_that_cannot_be_continued(name: str, prompt: list[int], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Stream(tiny.engine(name, ONE), [prompt], settings(4))


def test_nothing_asked_nothing_given() -> None:
    assert list(Stream(tiny.engine("decoder", ONE), [], settings(4))) == []
    with raises_error("E-GENERATE-001", "0"):
        Settings(0)


def test_weights_that_are_not_numbers_are_told() -> None:
    engine = tiny.fresh_engine("decoder", ONE)
    engine.params = jax.tree.map(lambda x: x * np.float32("nan"), engine.params)
    with raises_error("E-GENERATE-008"):
        next(Stream(engine, prompts(3), settings(4)))


def test_a_model_without_a_cache_reads_the_whole_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        """What a model of the user's own must have, and no more."""

        def __init__(self, model: Model) -> None:
            self.vocab, self.heads, self.specs, self.apply = model.vocab, model.heads, model.specs, model.apply
            self.flops_per_token = model.flops_per_token

    monkeypatch.setattr("forerun.generate.engine.CHUNK", 32)
    cached = tiny.engine("decoder", EIGHT)
    engine = Engine(Plain(MODELS["decoder"]), cached.params, cached.mesh, Compute(), frozenset(), VOCAB)
    rows = prompts(5, 1, 40)
    assert generated(engine, rows, settings(12)) == [recomputed("decoder", prompt, 12) for prompt in rows]


def test_buckets() -> None:
    assert prompt_chunks(512) == (1, 512)
    assert prompt_chunks(513) == (2, 512)
    assert [row_bucket(n, 4) for n in (1, 4, 5, 9)] == [4, 4, 8, 16]
