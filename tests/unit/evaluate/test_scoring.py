from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored_models as tiny
from error_assertions import raises_error
from recording_reporter import RecordingReporter

from forerun.errors import UserError
from forerun.evaluate.scoring import Request, Score, Scorer, token_scores
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Readout
from forerun.nn.compute import Compute


def scorer(name: str = "decoder", shape: MeshShape = tiny.ONE, rows: int = 4, context: int = 100) -> Scorer:
    params, mesh = tiny.placed(name, shape)
    return Scorer(tiny.MODELS[name], params, mesh, Compute(), rows=rows, context=context)


def requests(*lengths: tuple[int, int]) -> list[Request]:
    made = [tiny.some_tokens(before + after, seed) for seed, (before, after) in enumerate(lengths)]
    return [(ids[:before], ids[before:]) for ids, (before, _) in zip(made, lengths, strict=True)]


def expected(name: str, request: Request, context: int = 100) -> Score:
    """By numpy, of the row alone."""
    whole = [*request[0], *request[1]][-(context + 1) :]
    table = tiny.logprobs(name, whole[:-1])[-len(request[1]) :]
    values = tuple(float(row[token]) for row, token in zip(table, request[1], strict=True))
    return Score(values, [int(row.argmax()) for row in table] == list(request[1]))


def require_equal(found: list[Score], wanted: list[Score]) -> None:
    assert len(found) == len(wanted)
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.logprobs, right.logprobs, atol=1e-4)
        assert mine.logprob_sum == pytest.approx(sum(right.logprobs), abs=5e-4)
        assert mine.is_greedy == right.is_greedy


MIXED = requests((1, 1), (5, 3), (60, 30), (31, 1), (32, 1), (33, 4), (2, 17), (70, 1), (90, 10), (3, 3))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_scores_are_those_of_each_row_alone(name: str) -> None:
    require_equal(scorer(name).token_logprobs(MIXED), [expected(name, request) for request in MIXED])


def test_eight_devices_say_what_one_says() -> None:
    found = scorer(shape=tiny.EIGHT, rows=3)
    assert found.rows == 4, "rounded up to what data x fsdp splits evenly"
    require_equal(found.token_logprobs(MIXED), [expected("decoder", request) for request in MIXED])


def test_a_greedy_continuation_is_recognised_and_its_neighbour_is_not() -> None:
    context = tiny.some_tokens(10, 5)
    greedy = list(context)
    for _ in range(4):
        greedy.append(int(tiny.logprobs("decoder", greedy)[-1].argmax()))
    right, wrong = greedy[10:], [*greedy[10:13], (greedy[13] + 1) % tiny.VOCAB]
    found = scorer().token_logprobs([(context, right), (context, wrong)])
    assert [score.is_greedy for score in found] == [True, False]


def test_long_contexts_lose_their_oldest_tokens() -> None:
    long = requests((200, 5), (16, 16), (17, 1), (15, 1))
    require_equal(
        scorer(context=16).token_logprobs(long), [expected("decoder", request, context=16) for request in long]
    )


def test_the_program_is_compiled_once_per_bucket() -> None:
    counted = scorer()
    counted.token_logprobs(requests(*((length, 1) for length in range(1, 33))))
    assert counted._program._cache_size() == 1
    counted.token_logprobs(requests((33, 1), (40, 8), (64, 1)))
    assert counted._program._cache_size() == 3


def test_progress_ends_at_all_of_them() -> None:
    reporter = RecordingReporter()
    scorer().token_logprobs(MIXED, reporter)
    assert reporter.updates == sorted(reporter.updates)
    assert reporter.updates[-1] == (len(MIXED), len(MIXED))
    assert scorer().token_logprobs([]) == []


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_chunks_change_nothing(chunk: int) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    out = Readout(jax.random.normal(keys[0], (2, 12, 8)), jax.random.normal(keys[1], (16, 8)), softcap=3.0)
    targets = jax.random.randint(keys[2], (2, 12), 0, 16)
    logits = np.asarray(out.logits(), np.float64)
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.take_along_axis(table, np.asarray(targets)[..., None], -1)[..., 0]
    found, greedy = token_scores(out, targets, chunk)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(greedy, logits.argmax(-1) == np.asarray(targets))


def test_no_array_holds_all_logits() -> None:
    """A vocabulary of 16384 in rows of 256: 16 MiB a row, of which a chunk holds a part."""
    out = Readout(jax.ShapeDtypeStruct((8, 256, 8), jnp.float32), jax.ShapeDtypeStruct((1 << 14, 8), jnp.float32))
    targets = jax.ShapeDtypeStruct((8, 256), jnp.int32)

    def scores(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token_scores(Readout(hidden, matrix), targets, 8)

    compiled = jax.jit(scores).lower(out.hidden_BSE, out.matrix_VE, targets).compile()
    all_logits_bytes = 4 * 8 * 256 * (1 << 14)
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits_bytes / 4


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (([], [1]), "E-EVAL-006"),
        (([1], []), "E-EVAL-006"),
        (([1], [2] * 101), r"101.*100.*E-EVAL-007"),
        (([1], [tiny.VOCAB]), r"64.*E-EVAL-008"),
    ],
)
def test_what_cannot_be_scored_is_said(request_: Request, words: str) -> None:
    with pytest.raises(UserError, match=words):
        scorer().token_logprobs([([1], [2]), request_])


def test_weights_that_are_not_numbers_are_said() -> None:
    params, mesh = tiny.placed("decoder", tiny.ONE)
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with raises_error("E-EVAL-009"):
        Scorer(tiny.MODELS["decoder"], broken, mesh, Compute(), rows=2).token_logprobs([([1], [2])])
