"""How likely given tokens are after given contexts, on any mesh. B rows, S places, C chunk of them, E embed, V vocab.

Requests are sorted into buckets of length, each compiled once. Logits exist for a chunk of the places at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.models.base import Model, Readout
from forerun.nn.compute import Compute
from forerun.nn.lengths import length_bucket
from forerun.nn.sharding import BATCH_AXES, batched, constrain
from forerun.objectives.cross_entropy import chunk_length

SHORTEST = 32
LOGITS_BYTES = 256 << 20  # of one device, at a time

Request = tuple[Sequence[int], Sequence[int]]  # context, continuation
Progress = Callable[[int, int], None]  # (done, of how many); first with 0


@dataclass(frozen=True)
class Score:
    """Of one continuation. `is_greedy`: taking the likeliest token each time would have written it."""

    logprobs: tuple[float, ...]  # nats, one per token
    is_greedy: bool

    @property
    def logprob_sum(self) -> float:
        return math.fsum(self.logprobs)


class Scorer:
    """A model on its devices, asked for probabilities.

    Args:
      params: arrays as they are stored on the mesh.
      rows: requests that are computed together; rounded up to what the mesh splits evenly.
      context: the longest input in tokens; older tokens of a longer one are left out.
    """

    def __init__(
        self, model: Model, params: Any, mesh: Mesh, compute: Compute, *, rows: int = 8, context: int = 2048
    ) -> None:
        parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
        self.model, self.params, self.mesh, self.compute = model, params, mesh, compute
        self.rows, self.context = -(-rows // parts) * parts, context
        self._rows_per_device = self.rows // parts
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._program = jax.jit(self._scored, out_shardings=(everywhere, everywhere))

    def token_logprobs(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Score]:
        """A score for each request, in their order. The longest are computed first."""
        rows = [self._row(number, *request) for number, request in enumerate(requests)]
        scores: list[Score | None] = [None] * len(rows)
        done = 0
        if progress:
            progress(done, len(rows))
        for numbers, logprobs, greedy in self._computed(rows):
            for place, number in enumerate(numbers):
                span = slice(len(rows[number].inputs) - rows[number].scored, len(rows[number].inputs))
                found = tuple(logprobs[place, span].tolist())
                _require_finite(found)
                scores[number] = Score(found, bool(greedy[place, span].all()))
            done += len(numbers)
            if progress:
                progress(done, len(rows))
        return [score for score in scores if score is not None]

    def _row(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> _Row:
        """The last tokens that fit: of each, all but the last are read, and all but the first can be scored."""
        if not context or not continuation:
            missing = "continuation" if context else "context"
            raise UserError(
                f"request {number + 1}: its {missing} has no tokens",
                why="a probability is that of a token after another one",
                fix="look at the text of the task: the tokenizer must find a token on both sides of the border",
            )
        if len(continuation) > self.context:
            raise UserError(
                f"request {number + 1}: {len(continuation)} tokens are to be scored, {self.context} can be read",
                why="the tokens that are scored must fit into one context",
                fix=f"--context {len(continuation)}, if the model was trained for so many; otherwise another task",
            )
        whole = [*context, *continuation][-(self.context + 1) :]
        if max(whole) >= self.model.vocab or min(whole) < 0:
            raise UserError(
                f"request {number + 1} has the token {max(whole)}",
                why=f"the model knows {self.model.vocab}: its tokenizer belongs to another model",
                fix="use the tokenizer.json that came with the weights",
            )
        return _Row(whole[:-1], whole[1:], len(continuation))

    def _computed(self, rows: Sequence[_Row]) -> Iterator[tuple[list[int], NDArray[Any], NDArray[Any]]]:
        """Request numbers with their arrays [B, S]. While one batch is looked at, the next is computed."""
        waiting: tuple[list[int], jax.Array, jax.Array] | None = None
        for numbers, length in _batches(rows, self.rows):
            ahead = (numbers, *self._launched([rows[number] for number in numbers], length))
            if waiting:
                yield waiting[0], np.asarray(waiting[1]), np.asarray(waiting[2])
            waiting = ahead
        if waiting:
            yield waiting[0], np.asarray(waiting[1]), np.asarray(waiting[2])

    def _launched(self, rows: Sequence[_Row], length: int) -> tuple[jax.Array, jax.Array]:
        tokens, targets = (np.zeros((self.rows, length), np.int32) for _ in range(2))
        lengths = np.zeros(self.rows, np.int32)
        for place, row in enumerate(rows):
            lengths[place] = len(row.inputs)
            tokens[place, : lengths[place]], targets[place, : lengths[place]] = row.inputs, row.targets
        put = [
            jax.device_put(x, batched(self.mesh, x.shape, axes))
            for x, axes in ((tokens, "BS"), (targets, "BS"), (lengths, "B"))
        ]
        with jax.set_mesh(self.mesh):
            logprobs_BS, greedy_BS = self._program(self.params, *put)
        return logprobs_BS, greedy_BS

    def _scored(
        self, params: Any, tokens_BS: jax.Array, targets_BS: jax.Array, lengths_B: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        S = tokens_BS.shape[1]
        places_1S = jnp.arange(S, dtype=jnp.int32)[None]
        inside_BS = places_1S < lengths_B[:, None]
        positions_BS = jnp.where(inside_BS, places_1S, 0)
        out = self.model.apply(params, tokens_BS, inside_BS.astype(jnp.int32), positions_BS, self.compute)
        chunk = chunk_length(S, self._rows_per_device, self.model.vocab, LOGITS_BYTES)
        return token_scores(out, targets_BS, chunk)


@dataclass(frozen=True)
class _Row:
    inputs: list[int]
    targets: list[int]
    scored: int  # of the last targets


def token_scores(out: Readout, targets_BS: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """[B, S]: the log-probability of each target in float32, and whether it is the likeliest token."""
    B, S = targets_BS.shape
    if S % chunk:
        raise ValueError(f"{S} places do not divide into chunks of {chunk}")
    hidden_BSE = constrain(out.hidden_BSE, "BXE")  # chunks are cut along S, so no device may hold a part of it

    def one(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BCE, targets_BC = piece
        logits_BCV = constrain(replace(out, hidden_BSE=hidden_BCE).logits(), "BCV")
        vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2)
        right_BC = jnp.sum(jnp.where(vocabulary == targets_BC[..., None], logits_BCV, 0.0), axis=-1)
        logprobs_BC = right_BC - jax.nn.logsumexp(logits_BCV, axis=-1)
        return logprobs_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, S // chunk, chunk, *x.shape[2:]), 1, 0)

    pieces = jax.lax.map(one, (cut(hidden_BSE), cut(targets_BS)))
    logprobs_BS, greedy_BS = (jnp.moveaxis(x, 0, 1).reshape(B, S) for x in pieces)
    return logprobs_BS, greedy_BS


def _batches(rows: Sequence[_Row], size: int) -> Iterator[tuple[list[int], int]]:
    """(request numbers, padded length) of each batch, the longest first: what does not fit fails at once."""
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        buckets[length_bucket(len(row.inputs), SHORTEST)].append(number)
    for length in sorted(buckets, reverse=True):
        numbers = buckets[length]
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size], length


def _require_finite(logprobs: Sequence[float]) -> None:
    if not all(math.isfinite(value) for value in logprobs):
        raise UserError(
            "the model's logits are not finite",
            why="its weights hold NaN or infinity, or overflow the dtype",
            fix="try --dtype float32; if it stays, the checkpoint itself is broken",
        )
