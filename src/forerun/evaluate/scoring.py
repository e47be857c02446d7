"""Log-probabilities of given tokens after given contexts, on any mesh.

B rows, S positions, C chunk of positions, E embed, V vocab. Requests are sorted into length buckets, and a program is
compiled once per bucket. Logits are computed for one chunk of positions at a time.
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
from forerun.nn.compute import Compute, length_bucket
from forerun.nn.sharding import BATCH_AXES, batched, constrain
from forerun.objectives.cross_entropy import chunk_length
from forerun.reporter import SILENT, Reporter

SHORTEST = 32
LOGITS_BYTES = 256 << 20  # limit for the logits of a chunk on one device

Request = tuple[Sequence[int], Sequence[int]]  # context, continuation


@dataclass(frozen=True)
class Score:
    """The score of one continuation."""

    logprobs: tuple[float, ...]  # nats, one per token
    is_greedy: bool  # whether greedy decoding would generate this continuation

    @property
    def logprob_sum(self) -> float:
        """The log-probability of the continuation, in nats."""
        return math.fsum(self.logprobs)


class Scorer:
    """A model on its devices that scores given tokens.

    Args:
        model: The model.
        params: Parameters with their stored sharding.
        mesh: The device mesh.
        compute: The settings of the computation.
        rows: Requests per batch, rounded up to a multiple that the mesh divides evenly.
        context: The longest input in tokens. The oldest tokens of a longer input are dropped.
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

    def token_logprobs(self, requests: Sequence[Request], reporter: Reporter = SILENT) -> list[Score]:
        """Return a score for each request, in the order of the requests. The longest are computed first.

        Args:
            requests: Pairs of context and continuation, as ids.
            reporter: Shows the number of finished requests.

        Raises:
            UserError: A request has no tokens, is too long or has unknown ids, or the logits are not finite.
        """
        rows = [self._row(number, *request) for number, request in enumerate(requests)]
        scores: list[Score | None] = [None] * len(rows)
        done = 0
        with reporter.progress("requests", len(rows)) as progress:
            for numbers, logprobs, greedy in self._computed(rows):
                for place, number in enumerate(numbers):
                    span = slice(len(rows[number].inputs) - rows[number].scored, len(rows[number].inputs))
                    found = tuple(logprobs[place, span].tolist())
                    _require_finite(found)
                    scores[number] = Score(found, bool(greedy[place, span].all()))
                done += len(numbers)
                progress.update(done)
        return [score for score in scores if score is not None]

    def _row(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> _Row:
        """Return the inputs and targets of a request, truncated to the last tokens that fit the context."""
        if not context or not continuation:
            missing = "continuation" if context else "context"
            raise UserError(
                "E-EVAL-006",
                f"request {number + 1}: its {missing} has no tokens",
                why="a score is the probability of at least one token after at least one other",
                fix="check the text of the task: both its context and its continuation need at least one token",
            )
        if len(continuation) > self.context:
            raise UserError(
                "E-EVAL-007",
                f"request {number + 1}: the continuation has {len(continuation)} tokens, the context {self.context}",
                why="all tokens that are scored must fit into one context",
                fix=f"set --context {len(continuation)} if the model was trained for it, or choose another task",
            )
        whole = [*context, *continuation][-(self.context + 1) :]
        if max(whole) >= self.model.vocab or min(whole) < 0:
            raise UserError(
                "E-EVAL-008",
                f"request {number + 1} has the token {max(whole)}",
                why=f"the vocabulary has {self.model.vocab} tokens: the tokenizer belongs to another model",
                fix="use the tokenizer.json that came with the weights",
            )
        return _Row(whole[:-1], whole[1:], len(continuation))

    def _computed(self, rows: Sequence[_Row]) -> Iterator[tuple[list[int], NDArray[Any], NDArray[Any]]]:
        """Yield the request numbers of each batch with its arrays [B, S].

        The devices compute the next batch while the caller processes this one.
        """
        waiting: tuple[list[int], jax.Array, jax.Array] | None = None
        for numbers, length in _batches(rows, self.rows):
            ahead = (numbers, *self._launched([rows[number] for number in numbers], length))
            if waiting:
                yield waiting[0], np.asarray(waiting[1]), np.asarray(waiting[2])
            waiting = ahead
        if waiting:
            yield waiting[0], np.asarray(waiting[1]), np.asarray(waiting[2])

    def _launched(self, rows: Sequence[_Row], length: int) -> tuple[jax.Array, jax.Array]:
        """Start the computation of a batch, and return its arrays without waiting for them."""
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
    """The tokens of one request."""

    inputs: list[int]
    targets: list[int]
    scored: int  # number of targets at the end that are scored


def token_scores(out: Readout, targets_BS: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each target in float32, and whether it is the most probable token, both [B, S]."""
    B, S = targets_BS.shape
    if S % chunk:
        raise ValueError(f"{S} places do not divide into chunks of {chunk}")
    hidden_BSE = constrain(out.hidden_BSE, "BXE")  # chunks are cut along S, so S must not be split (X is never split)

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
    """Yield the request numbers and the padded length of each batch.

    The longest come first, so that a batch that does not fit in memory fails immediately.
    """
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
            "E-EVAL-009",
            "the model's logits are not finite",
            why="its weights hold NaN or infinity, or overflow the dtype",
            fix="try --dtype float32; if the error remains, the checkpoint itself is broken",
        )


# ---- What tasks of lm-eval need besides scores ----


Messages = list[dict[str, str]]


@dataclass(frozen=True)
class GenerationRequest:
    """Generation settings of a task. Temperature 0 chooses the most probable token."""

    max_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


# Returns the new tokens of each prompt, until the end token, a stop text (which may be included) or the maximum number.
Generate = Callable[[Sequence[Sequence[int]], GenerationRequest], list[list[int]]]


@dataclass(frozen=True)
class Language:
    """A tokenizer as functions, which do not add special tokens."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos: int
    prefix: int  # the context of a text without one: the beginning token, or else the end token
    prefix_text: str | None = None
    opening: tuple[int, ...] = ()  # ids that the tokenizer adds before every text
    chat_template: str | None = None
    render: Callable[[Messages, bool], str] | None = None  # (messages, whether to add a generation prompt) -> text
