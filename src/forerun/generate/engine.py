"""The device side of generation: reads prompts into the cache, then computes one token per row and step, on any mesh.

Each program is compiled once per length bucket. B rows, T new tokens, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.generate.sampling import Rule, Sampling, choose
from forerun.models.base import Capabilities, Model, Readout, capabilities_of
from forerun.nn import spec
from forerun.nn.compute import Compute, length_bucket
from forerun.nn.kv_cache import Cache
from forerun.nn.sharding import ACTIVATIONS, BATCH_AXES, partition
from forerun.nn.spec import Fill, ParamSpec

# Prompt lengths and row counts are rounded up, so that few programs are compiled.
SHORTEST = 64
CHUNK = 512  # tokens of a prompt per step; limits the attention scores, which are CHUNK x cache length


class CachedModel(Protocol):
    """A model with a cache of earlier tokens, which can compute new tokens alone."""

    @property
    def vocab(self) -> int: ...

    def cache(self, rows: int, length: int, dtype: Any) -> Any:
        """Return the cache for `rows` texts of up to `length` tokens, as a tree of ParamSpec."""

    def extend(
        self, params: Any, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any, compute: Compute
    ) -> tuple[Readout, Any]: ...


@dataclass(frozen=True)
class Settings:
    """Settings of a generation. The same seed gives the same tokens, regardless of the other rows in the batch."""

    max_tokens: int = 128
    sampling: Sampling = Sampling()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(
                "E-GENERATE-001",
                f"cannot generate {self.max_tokens} tokens",
                why="the number of tokens must be at least 1",
                fix="set it to a positive number, such as 128",
            )


@dataclass(frozen=True)
class DevicePlace:
    """The state of a stream on the devices."""

    tokens_B: jax.Array  # the newest token of each row
    positions_B: jax.Array  # its position
    cache: Any  # keys and values of all earlier tokens
    length: int  # slots of the cache


class Engine:
    """A model on its devices, with the compiled programs for generation.

    Args:
        model: The model. Without `cache` and `extend`, every token is computed from the complete text.
        params: Parameters with their stored sharding, in the compute dtype.
        mesh: The device mesh.
        compute: The settings of the computation.
        eos: Token ids that end a row.
        vocab: The number of ids of the tokenizer. Further ids of the model are never chosen.
        consume: Whether the engine may delete `params`. On a single CPU device it then separates their layers. This
            makes decoding faster and compilation slower.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        mesh: Mesh,
        compute: Compute,
        eos: frozenset[int],
        vocab: int,
        *,
        consume: bool = False,
    ) -> None:
        self.model, self.mesh, self.compute = _cached(model), mesh, compute
        unstacked = getattr(model, "unstacked", None)
        self._apart = consume and unstacked is not None and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        self.params = unstacked(params) if unstacked is not None and self._apart else params
        self.eos, self.vocab = eos, min(vocab, model.vocab)
        capabilities = capabilities_of(model)
        self.positions, self.switch = capabilities.positions, capabilities.rope_switch
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        cache = spec.map_specs(self._laid_out, self._cache_specs(self._row_multiple, length_bucket(1, SHORTEST)))
        results = (self._everywhere, self._everywhere, cache)
        names = ("rule", "length")
        self.read = jax.jit(self._read, static_argnames=names, donate_argnames="cache", out_shardings=results)
        self.step = jax.jit(self._step, static_argnames="rule", donate_argnames="cache", out_shardings=results)
        self._empty = jax.jit(self._empty_cache, static_argnames=("rows", "length"), out_shardings=cache)
        self._grow = jax.jit(self._longer_cache, static_argnames=("rows", "length"), out_shardings=cache)

    def rows(self, count: int) -> int:
        """Return the number of rows of a batch for `count` prompts, including padding."""
        return row_bucket(count, self._row_multiple)

    def check(self, prompt: Sequence[int], name: str) -> None:
        """Raise a UserError if a prompt cannot be continued. `name` refers to the prompt in the error."""
        if not prompt:
            raise UserError(
                "E-GENERATE-002",
                f"{name} is empty",
                why="the model needs at least one token to continue from",
                fix="write at least one word",
            )
        if self.positions is not None and len(prompt) > self.positions:
            raise UserError(
                "E-GENERATE-003",
                f"{name} has {len(prompt)} tokens",
                why=f"this model has only {self.positions} positions",
                fix=f"shorten it to fewer than {self.positions} tokens, or use a model with a longer context",
            )
        if max(prompt) >= self.model.vocab:
            raise UserError(
                "E-GENERATE-004",
                f"{name} has the token {max(prompt)}",
                why=f"the vocabulary has {self.model.vocab} tokens: the tokenizer belongs to another model",
                fix="use the tokenizer.json that came with the weights",
            )

    def put(self, array: Any) -> jax.Array:
        """Return a small array, replicated on every device."""
        return jax.device_put(array, self._everywhere)

    def begin(self, sequences: Sequence[Sequence[int]], room: int, chooser: Chooser) -> DevicePlace:
        """Read all sequences into a new cache, and choose the next token of each.

        Args:
            sequences: The tokens of each row.
            room: Free slots in the cache after the longest sequence.
            chooser: The rule for choosing tokens.
        """
        rows, lengths = len(sequences), [len(sequence) for sequence in sequences]
        # With LongRope the length of a row decides its rotation, so each row must be read in one chunk.
        chunk = max(CHUNK, max(lengths)) if self.switch is not None else CHUNK
        chunks, size = prompt_chunks(max(lengths), chunk)
        padded = np.zeros((rows, chunks * size), np.int32)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = sequence
        length = length_bucket(max(chunks * size, max(lengths) + room), SHORTEST)
        last_B = self.put(np.asarray(lengths, np.int32) - 1)
        tokens_B = self.put(np.zeros(rows, np.int32))
        with jax.set_mesh(self.mesh):
            # Built-in models read the first chunk without a cache, because it would be empty. Others get zeros.
            cache = (
                None if isinstance(self._cache_specs(rows, length), Cache) else self._empty(rows=rows, length=length)
            )
            for start in range(0, chunks * size, size):
                piece, first = self.put(padded[:, start : start + size]), self.put(np.int32(start))
                prompts = (self.params, piece, first, last_B, tokens_B, cache)
                tokens_B, positions_B, cache = self.read(*prompts, *chooser.arguments, rule=chooser.rule, length=length)
        return DevicePlace(tokens_B, positions_B, cache, length)

    def advance(self, place: DevicePlace, furthest: int, alive_B: jax.Array, chooser: Chooser) -> DevicePlace:
        """Compute one more token per row.

        Args:
            place: The state after the last step.
            furthest: The largest position of a newest token. The cache grows if it has no slot for it.
            alive_B: The rows that continue. The positions of the other rows do not change.
            chooser: The rule for choosing tokens.
        """
        cache, length = place.cache, place.length
        with jax.set_mesh(self.mesh):
            if furthest >= length:
                length = length_bucket(furthest + 1, SHORTEST)
                cache = self._grow(cache, rows=place.tokens_B.shape[0], length=length)
            tokens_B, positions_B, cache = self.step(
                self.params, place.tokens_B, place.positions_B, alive_B, cache, *chooser.arguments, rule=chooser.rule
            )
        return DevicePlace(tokens_B, positions_B, cache, length)

    def _read(
        self,
        params: Any,
        tokens_BT: jax.Array,
        start: jax.Array,
        last_B: jax.Array,
        chosen_B: jax.Array,
        cache: Any,
        seed: jax.Array,
        rows_B: jax.Array,
        temperature: jax.Array,
        *,
        rule: Rule,
        length: int,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Read a chunk of all prompts; return the chosen tokens, their positions and the cache.

        Rows that end in this chunk get their next token; the others keep `chosen_B`. If `cache` is None, this is the
        first chunk, and a cache with `length` slots is created.
        """
        B, T = tokens_BT.shape
        before = self._empty_cache(rows=B, length=0) if cache is None else cache
        ahead_B = jnp.maximum(last_B - start, 0)
        # Padding repeats the last position, so that it never exceeds the model's positions or makes a row longer.
        positions_BT = start + jnp.minimum(jnp.arange(T, dtype=jnp.int32), ahead_B[:, None])
        readout, after = self.model.extend(params, tokens_BT, positions_BT, before, self.compute)
        if cache is None:
            cache = self._longer_cache(after, rows=B, length=length)
        else:
            cache = after if isinstance(cache, Cache) else self._unless_ended(last_B < start, cache, after)
        end_B = jnp.minimum(ahead_B, T - 1)
        ending = replace(readout, hidden_BSE=jnp.take_along_axis(readout.hidden_BSE, end_B[:, None, None], axis=1))
        next_B = self._chosen(ending, last_B + 1, seed, rows_B, temperature, rule)
        here_B = (last_B >= start) & (last_B < start + T)
        return jnp.where(here_B, next_B, chosen_B), last_B + 1, cache

    def _step(
        self,
        params: Any,
        tokens_B: jax.Array,
        positions_B: jax.Array,
        alive_B: jax.Array,
        cache: Any,
        seed: jax.Array,
        rows_B: jax.Array,
        temperature: jax.Array,
        *,
        rule: Rule,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Compute the next token of each row; return the tokens, their positions and the cache."""
        known_B1 = jnp.maximum(tokens_B, 0)[:, None]
        readout, cache = self.model.extend(params, known_B1, positions_B[:, None], cache, self.compute)
        next_B = self._chosen(readout, positions_B + 1, seed, rows_B, temperature, rule)
        return next_B, positions_B + alive_B.astype(jnp.int32), cache

    def _chosen(
        self, readout: Readout, places_B: jax.Array, seed: jax.Array, rows_B: jax.Array, temperature: Any, rule: Rule
    ) -> jax.Array:
        """Return the next token of each row. Its random key depends only on the seed, the row and the position."""
        fold = jax.vmap(jax.random.fold_in)
        keys_B = fold(jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(rows_B), places_B)
        return choose(readout.logits()[:, 0], keys_B, temperature, rule, self.vocab)

    def _unless_ended(self, ended_B: jax.Array, before: Any, after: Any) -> Any:
        """Return the cache after a chunk, but that from before for rows whose prompt ended in an earlier chunk.

        A custom cache may be a state without positions, which the padding of such a row must not change. In a key/value
        cache, new tokens overwrite the padding.
        """

        def chosen(s: spec.ParamSpec, old: jax.Array, new: jax.Array) -> jax.Array:
            if "B" not in s.axes:
                return new
            return jnp.where(ended_B.reshape([-1 if axis == "B" else 1 for axis in s.axes]), old, new)

        return jax.tree.map(chosen, self._cache_specs(ended_B.size, 1), before, after, is_leaf=spec.is_spec)

    @property
    def _row_multiple(self) -> int:
        return int(np.prod([self.mesh.shape.get(axis, 1) for axis in BATCH_AXES]))

    def _cache_specs(self, rows: int, length: int) -> Any:
        specs = self.model.cache(rows, length, self.compute.dtype)
        return specs.apart() if self._apart else specs

    def _laid_out(self, s: spec.ParamSpec) -> NamedSharding:
        return NamedSharding(self.mesh, partition(s.shape, s.axes, self.mesh.shape, ACTIVATIONS))

    def _empty_cache(self, *, rows: int, length: int) -> Any:
        return spec.map_specs(lambda s: jnp.zeros(s.shape, s.dtype), self._cache_specs(rows, length))

    def _longer_cache(self, cache: Any, *, rows: int, length: int) -> Any:
        def longer(s: spec.ParamSpec, old: jax.Array) -> jax.Array:
            return jnp.pad(old, [(0, wanted - had) for wanted, had in zip(s.shape, old.shape, strict=True)])

        return jax.tree.map(longer, self._cache_specs(rows, length), cache, is_leaf=spec.is_spec)


class Chooser:
    """The sampling rule of one stream, with its arguments on the devices."""

    def __init__(self, engine: Engine, settings: Settings, rows: NDArray[np.uint32]) -> None:
        sampling = settings.sampling
        self.rule = sampling.rule
        self.arguments = (
            engine.put(np.uint32(settings.seed % 2**32)),
            engine.put(rows),
            engine.put(np.float32(sampling.temperature or 1.0)),
        )


def _cached(model: Model) -> CachedModel:
    """Return `model` if it has a cache, or a wrapper that reads the complete text again for every token."""
    return model if capabilities_of(model).has_cache else UncachedModel(model)  # type: ignore[return-value]


def prompt_chunks(length: int, chunk: int = CHUNK) -> tuple[int, int]:
    """Return the number of chunks for a prompt, and the number of tokens of each chunk."""
    if length <= chunk:
        return 1, length_bucket(length, SHORTEST)
    return -(-length // chunk), chunk


def row_bucket(rows: int, multiple: int) -> int:
    """Return the smallest power of two times `multiple` that is at least `rows`."""
    bucket = multiple
    while bucket < rows:
        bucket *= 2
    return bucket


@dataclass(frozen=True)
class UncachedModel:
    """A wrapper that adds `cache` and `extend` to a model. The cost of a token grows with the text before it.

    The model is causal, so values after the last token of a row have no effect.
    """

    model: Model

    @property
    def vocab(self) -> int:
        return self.model.vocab

    @property
    def capabilities(self) -> Capabilities:
        return replace(capabilities_of(self.model), has_cache=True)

    def cache(self, rows: int, length: int, dtype: Any) -> ParamSpec:
        """Return the spec of the tokens so far. A token's index is its position, as in `forerun.nn.kv_cache`."""
        return ParamSpec((rows, length), "BT", Fill(0.0), jnp.int32)  # not the letter S, which tp would split

    def extend(
        self, params: Any, tokens_BT: jax.Array, positions_BT: jax.Array, cache: jax.Array, compute: Compute
    ) -> tuple[Readout, jax.Array]:
        """Return the read-out at the new tokens, and the text including them."""

        def put(old_S: jax.Array, new_T: jax.Array, place: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old_S, new_T, (place,))

        text_BS = jax.vmap(put)(cache, tokens_BT, positions_BT[:, 0])
        everywhere_BS = jnp.broadcast_to(jnp.arange(text_BS.shape[1], dtype=jnp.int32), text_BS.shape)
        out = self.model.apply(params, text_BS, jnp.ones_like(text_BS), everywhere_BS, compute)
        hidden_BTE = jnp.take_along_axis(out.hidden_BSE, positions_BT[..., None], axis=1)
        return replace(out, hidden_BSE=hidden_BTE), text_BS
