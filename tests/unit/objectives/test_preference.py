"""DPO, IPO and cDPO on packed pairs, against the formulae of TRL's DPOTrainer in torch, side by side, pair by pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from spec_shapes import shapes_of

from forerun.data.documents import in_memory
from forerun.data.order.mixture import Mixture
from forerun.data.order.pairs import PairReferences, Pairs
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.nn import spec
from forerun.nn.attention import Kernel
from forerun.nn.compute import Compute
from forerun.nn.weights.dense import Dense, map_weights
from forerun.nn.weights.lowrank import LowRank
from forerun.objectives.base import WithCompanion
from forerun.objectives.batch import Batch
from forerun.objectives.preference import Preference, by_side

S, V, PAIRS = 64, 61, 9
LONGEST = 20
TINY = DecoderConfig(layers=1, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=32, vocab=V)
COMPUTE = Compute(jnp.dtype("float32"), Kernel("xla"))


def pairs() -> tuple[list[list[int]], list[list[bool]]]:
    """(sequences, masks), chosen and rejected in turns."""
    rng = np.random.default_rng(1)
    sequences, masks = [], []
    for _ in range(PAIRS):
        prompt = rng.integers(0, V, rng.integers(1, 8)).tolist()
        for _ in range(2):
            answer = rng.integers(0, V, rng.integers(1, 10)).tolist()
            sequences.append(prompt + answer)
            masks.append([False] * len(prompt) + [True] * len(answer))
    return sequences, masks


def params(seed: int) -> Any:
    return spec.initial(Decoder(TINY).specs(), jax.random.key(seed))


def logits_of(weights: Any, tokens: list[int]) -> np.ndarray:
    """One sequence by itself, padding behind it."""
    ids = np.zeros((1, LONGEST), np.int32)
    ids[0, : len(tokens)] = tokens
    return np.array(_logits(weights, jnp.asarray(ids))[0, : len(tokens)])


@jax.jit
def _logits(weights: Any, ids: jax.Array) -> jax.Array:
    places = jnp.arange(LONGEST, dtype=jnp.int32)[None]
    return Decoder(TINY).apply(weights, ids, jnp.ones_like(ids), places, COMPUTE).logits()


def batch_of(rows: Any, numbers: list[int]) -> Batch[jax.Array]:
    return Batch.of({name: jnp.asarray(array) for name, array in rows.take(numbers).items()})


def with_reference(one: Pairs, values: NDArray[np.float32]) -> Mixture:
    return Mixture([one]).with_extra(PairReferences((one,), (values,)))


@pytest.fixture(scope="module")
def rows() -> Mixture:
    """The reference is another model; its numbers come from sequences one by one, in numpy."""
    sequences, masks = pairs()
    said = []
    for tokens, mask in zip(sequences, masks, strict=True):
        logits = logits_of(params(7), tokens).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        said.append(sum(likely[n - 1, tokens[n]] for n in range(1, len(tokens)) if mask[n]))
    return with_reference(Pairs(in_memory(sequences, masks), S), np.array(said, np.float32).reshape(-1, 2))


def computed(objective: Preference, weights: Any, batch: Batch[jax.Array]) -> dict[str, float]:
    sums = jax.jit(lambda w, b: objective(Decoder(TINY), w, b, COMPUTE))(weights, batch)
    weight = float(sums.weight)
    told = {name: float(value) / weight for name, value in sums.told.items()}
    return told | {"loss": float(sums.loss) / weight, "weight": weight}


@pytest.mark.torch
@pytest.mark.parametrize(("loss", "beta", "smoothing"), [("dpo", 0.1, 0.0), ("ipo", 0.3, 0.0), ("cdpo", 0.5, 0.2)])
def test_loss_and_metrics_are_those_of_trl(loss: Any, beta: float, smoothing: float, rows: Mixture) -> None:
    import torch
    from torch.nn.functional import logsigmoid

    logps: dict[str, list[Any]] = {"policy": [], "reference": []}
    sequences, masks = pairs()
    for name, seed in (("policy", 0), ("reference", 7)):
        for tokens, mask in zip(sequences, masks, strict=True):
            logits = torch.from_numpy(logits_of(params(seed), tokens))
            labels, counted = torch.tensor(tokens)[1:], torch.tensor(mask)[1:]
            each = torch.gather(logits[:-1].log_softmax(-1), 1, labels[:, None])[:, 0] * counted
            logps[name].append(each.sum() / counted.sum() if loss == "ipo" else each.sum())
    policy, reference = (torch.stack(logps[name]).reshape(-1, 2) for name in ("policy", "reference"))
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    if loss == "ipo":
        losses = (logits - 1 / (2 * beta)) ** 2
    else:
        losses = -logsigmoid(beta * logits) * (1 - smoothing) - logsigmoid(-beta * logits) * smoothing
    rewards = beta * (policy - reference)
    found = computed(Preference(5, loss, beta, smoothing), params(0), batch_of(rows, [*range(len(rows))]))
    wanted = {
        "loss": losses.mean(),
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).float().mean(),
        "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean(),
        "logps/chosen": policy[:, 0].mean(),
        "logps/rejected": policy[:, 1].mean(),
    }
    assert found.pop("weight") == PAIRS
    assert set(found) == set(wanted)
    assert 0 < float(wanted["rewards/accuracies"]) < 1, "it would prove little"
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], float(value), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_packed_is_one_pair_in_a_row(loss: Any, rows: Mixture) -> None:
    """Loss and gradient of rows that hold several pairs, and of rows of which all but one pair are empty."""
    objective = Preference(16, loss)

    def total(weights: Any, batch: Batch[jax.Array]) -> Any:
        sums = objective(Decoder(TINY), weights, batch, COMPUTE)
        return sums.loss, sums.weight

    gradient = jax.jit(jax.value_and_grad(total, has_aux=True))
    (together, many), packed = gradient(params(0), batch_of(rows, [*range(len(rows))]))
    sequences, masks = pairs()
    assert isinstance(rows.extra, PairReferences)
    (values,) = rows.extra.values
    alone = [
        with_reference(Pairs(in_memory(sequences[2 * n : 2 * n + 2], masks[2 * n : 2 * n + 2]), S), values[n : n + 1])
        for n in range(PAIRS)
    ]
    assert len(rows) < PAIRS
    assert float(many) == PAIRS
    parts = [gradient(params(0), batch_of(one, [0] * len(rows))) for one in alone]
    each = [(float(value) / len(rows), jax.tree.map(lambda g: g / len(rows), slopes)) for (value, _), slopes in parts]
    np.testing.assert_allclose(together, sum(value for value, _ in each), rtol=1e-5)
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(slopes for _, slopes in each))
    for have, want in zip(jax.tree.leaves(packed), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-5 * float(jnp.abs(want).max()) + 1e-7)


def test_a_row_that_weighs_nothing_has_no_pairs(rows: Mixture) -> None:
    batch = batch_of(rows, [0, 1])
    empty = Batch(
        batch.tokens, batch.targets, batch.weights.at[1].set(0), batch.segments, batch.positions, batch.extras
    )
    one = computed(Preference(16), params(0), batch_of(rows, [0, 0]))
    found = computed(Preference(16), params(0), empty)
    assert found["weight"] == len(rows.examples(0)) == one["weight"] / 2
    for name in ("loss", "rewards/margins", "logps/chosen"):
        np.testing.assert_allclose(found[name], one[name], rtol=1e-5)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_pair_with_one_empty_answer_does_not_count(loss: Any, side: int, rows: Mixture) -> None:
    """Sums of the batch are those of the batch without the pair, also for the rejected answer alone."""
    batch = batch_of(rows, [0, 1])
    owners = batch.extras["pairs"][0]
    assert {1, -1, 2, -2} <= set(owners.tolist()), "the first row has two pairs"

    def without(*owned: int) -> Batch[jax.Array]:
        empty = jnp.isin(owners, jnp.asarray(owned))
        return replace(batch, weights=batch.weights.at[0].set(jnp.where(empty, 0.0, batch.weights[0])))

    objective = Preference(16, loss)
    found, wanted = (computed(objective, params(0), one) for one in (without(side), without(1, -1)))
    assert found["weight"] == wanted["weight"] == computed(objective, params(0), batch)["weight"] - 1
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def adapted(weights: Any) -> Any:
    """Low-rank adapters that do change something beside the weights."""

    def leaf(weight: Any) -> Any:
        if not isinstance(weight, Dense) or weight.value.ndim < 3:
            return weight
        L, E, *outs = weight.value.shape
        down, up = (jax.random.normal(jax.random.key(n), (*size,)) for n, size in ((1, (L, E, 2)), (2, (L, 2, *outs))))
        return LowRank(base=weight, down=down, up=up, inputs=1, scale=0.05)

    return map_weights(leaf, weights)


def test_every_reference_says_the_same(rows: Mixture) -> None:
    """What stands in the cache, a companion beside the model, and the model without its adapters: one number."""
    batch = batch_of(rows, [*range(len(rows))])
    beside = Preference(16, reference="beside")
    found = {
        "cached": computed(Preference(16), params(0), batch),
        "beside": computed(beside, WithCompanion(params(0), params(7)), batch),
        "cached, adapted": computed(Preference(16), adapted(params(7)), batch),
        "base": computed(Preference(16, reference="base"), adapted(params(7)), batch),
    }
    assert abs(found["base"]["rewards/margins"]) > 1e-3, "the adapters change nothing"
    for one, other in (("cached", "beside"), ("cached, adapted", "base")):
        for name, value in found[one].items():
            np.testing.assert_allclose(found[other][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{other} {name}")


def test_a_copy_beside_is_the_model_that_the_run_began_with() -> None:
    objective = Preference(16, reference="beside", dtype="bfloat16")
    started, specs = objective.start(params(0), {}), objective.specs(Decoder(TINY).specs())
    assert jax.tree.structure(started) == jax.tree.structure(shapes_of(specs))
    companion = jax.tree.leaves(specs.companion, is_leaf=spec.is_spec)
    assert all(not leaf.saved and not leaf.trainable and leaf.dtype == jnp.bfloat16 for leaf in companion)
    for have, want in zip(jax.tree.leaves(started.companion), jax.tree.leaves(params(0)), strict=True):
        np.testing.assert_array_equal(have, want.astype(jnp.bfloat16))


def test_sums_by_side() -> None:
    values = jnp.arange(32, dtype=jnp.float32)[None]
    owners = jnp.asarray([[1] * 3 + [-1] * 5 + [2] * 4 + [-2] * 10 + [0] * 10], jnp.int32)
    assert by_side(values, owners).tolist() == [[[0 + 1 + 2, 3 + 4 + 5 + 6 + 7], [8 + 9 + 10 + 11, sum(range(12, 22))]]]
