"""The compiled half of generation: prompts into the cache, then one token per row and step, on any mesh.

Each program is compiled once per bucket of lengths. B rows, T new tokens, S places of the cache, V vocabulary.
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
from forerun.generate.buckets import CHUNK, SHORTEST, prompt_chunks, row_bucket
from forerun.generate.sampling import Rule, Sampling, choose
from forerun.generate.uncached import Recomputing
from forerun.models.base import Model, Readout
from forerun.nn import spec
from forerun.nn.cache import Cache
from forerun.nn.compute import Compute
from forerun.nn.lengths import length_bucket
from forerun.nn.rope import LongRope
from forerun.nn.sharding import ACTIVATIONS, BATCH_AXES, partition


class CachedModel(Model, Protocol):
    """A model that can be asked for one token after the other."""

    def cache(self, rows: int, length: int, dtype: Any) -> Any:
        """A tree of ParamSpec."""

    def extend(
        self, params: Any, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any, compute: Compute
    ) -> tuple[Readout, Any]: ...


@dataclass(frozen=True)
class Settings:
    """What is asked for. The same seed gives the same tokens, whatever else is in the batch."""

    max_tokens: int = 128
    sampling: Sampling = Sampling()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(
                f"{self.max_tokens} tokens are nothing to generate", why="at least one is needed", fix="such as 128"
            )


@dataclass(frozen=True)
class Place:
    """Where a stream stands on the devices: each row's newest token, its place, and all keys and values before it."""

    tokens_B: jax.Array
    positions_B: jax.Array
    cache: Any
    length: int  # places in the cache


class Engine:
    """A model on its devices.

    Args:
      model: with `cache` and `extend` beside `apply`, or else every token is computed from the whole text.
      params: arrays as they are stored on the mesh, in the computing dtype.
      eos: ids that end a row.
      vocab: ids of the tokenizer; the model may have more, which are never chosen.
      consume: `params` belong to the engine and may be deleted. On a single CPU device their layers are then taken
        apart, which makes a decoded token faster and takes longer to compile.
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
        self.positions: int | None = getattr(getattr(model, "config", None), "positions", None)
        self.switch = _switch(model)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        cache = spec.map_specs(self._laid_out, self._cache_specs(self._row_multiple, length_bucket(1, SHORTEST)))
        results = (self._everywhere, self._everywhere, cache)
        names = ("rule", "length")
        self.read = jax.jit(self._read, static_argnames=names, donate_argnames="cache", out_shardings=results)
        self.step = jax.jit(self._step, static_argnames="rule", donate_argnames="cache", out_shardings=results)
        self._empty = jax.jit(self._empty_cache, static_argnames=("rows", "length"), out_shardings=cache)
        self._grow = jax.jit(self._longer_cache, static_argnames=("rows", "length"), out_shardings=cache)

    def rows(self, count: int) -> int:
        """Rows of a batch that holds so many."""
        return row_bucket(count, self._row_multiple)

    def check(self, prompt: Sequence[int], name: str) -> None:
        """Whether a prompt can be continued; `name` is how the error speaks of it."""
        if not prompt:
            raise UserError(f"{name} is empty", why="there is no token to go on from", fix="write at least one word")
        if self.positions is not None and len(prompt) > self.positions:
            raise UserError(
                f"{name} has {len(prompt)} tokens",
                why=f"this model knows {self.positions} positions and no more",
                fix=f"shorten it to fewer than {self.positions} tokens, or use a model with a longer context",
            )
        if max(prompt) >= self.model.vocab:
            raise UserError(
                f"{name} has the token {max(prompt)}",
                why=f"the model knows {self.model.vocab}: its tokenizer belongs to another model",
                fix="use the tokenizer.json that came with the weights",
            )

    def put(self, array: Any) -> jax.Array:
        """A small array, whole on every device."""
        return jax.device_put(array, self._everywhere)

    def begin(self, sequences: Sequence[Sequence[int]], room: int, chooser: Chooser) -> Place:
        """All rows read into a fresh cache, with `room` for more, and the token that follows each."""
        rows, lengths = len(sequences), [len(sequence) for sequence in sequences]
        chunk = max(CHUNK, max(lengths)) if self.switch is not None else CHUNK
        chunks, size = prompt_chunks(max(lengths), chunk)
        padded = np.zeros((rows, chunks * size), np.int32)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = sequence
        length = length_bucket(max(chunks * size, max(lengths) + room), SHORTEST)
        last_B = self.put(np.asarray(lengths, np.int32) - 1)
        tokens_B = self.put(np.zeros(rows, np.int32))
        with jax.set_mesh(self.mesh):
            # Our own models read the first chunk without a cache: there is nothing in it yet.
            cache = (
                None if isinstance(self._cache_specs(rows, length), Cache) else self._empty(rows=rows, length=length)
            )
            for start in range(0, chunks * size, size):
                piece, first = self.put(padded[:, start : start + size]), self.put(np.int32(start))
                prompts = (self.params, piece, first, last_B, tokens_B, cache)
                tokens_B, positions_B, cache = self.read(*prompts, *chooser.arguments, rule=chooser.rule, length=length)
        return Place(tokens_B, positions_B, cache, length)

    def advance(self, place: Place, furthest: int, alive_B: jax.Array, chooser: Chooser) -> Place:
        """One more token per row; only living rows move on. `furthest` is the place of the newest token of any."""
        cache, length = place.cache, place.length
        with jax.set_mesh(self.mesh):
            if furthest >= length:
                length = length_bucket(furthest + 1, SHORTEST)
                cache = self._grow(cache, rows=place.tokens_B.shape[0], length=length)
            tokens_B, positions_B, cache = self.step(
                self.params, place.tokens_B, place.positions_B, alive_B, cache, *chooser.arguments, rule=chooser.rule
            )
        return Place(tokens_B, positions_B, cache, length)

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
        """Read a chunk of all prompts. Rows that end in it get their next token, the others keep `chosen_B`.

        Without a cache it is the first chunk, which makes one with `length` places.
        """
        B, T = tokens_BT.shape
        before = self._empty_cache(rows=B, length=0) if cache is None else cache
        ahead_B = jnp.maximum(last_B - start, 0)
        # Padding repeats the last position: it stays within the model's positions and lengthens no row.
        positions_BT = start + jnp.minimum(jnp.arange(T, dtype=jnp.int32), ahead_B[:, None])
        readout, after = self.model.extend(params, tokens_BT, positions_BT, before, self.compute)
        cache = self._longer_cache(after, rows=B, length=length) if cache is None else after
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
        known_B1 = jnp.maximum(tokens_B, 0)[:, None]
        readout, cache = self.model.extend(params, known_B1, positions_B[:, None], cache, self.compute)
        next_B = self._chosen(readout, positions_B + 1, seed, rows_B, temperature, rule)
        return next_B, positions_B + alive_B.astype(jnp.int32), cache

    def _chosen(
        self, readout: Readout, places_B: jax.Array, seed: jax.Array, rows_B: jax.Array, temperature: Any, rule: Rule
    ) -> jax.Array:
        """The key of a token comes from the seed, its row and its place alone."""
        fold = jax.vmap(jax.random.fold_in)
        keys_B = fold(jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(rows_B), places_B)
        return choose(readout.logits()[:, 0], keys_B, temperature, rule, self.vocab)

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
    """How the tokens of one stream are chosen, on the devices."""

    def __init__(self, engine: Engine, settings: Settings, rows: NDArray[np.uint32]) -> None:
        sampling = settings.sampling
        self.rule = sampling.rule
        self.arguments = (
            engine.put(np.uint32(settings.seed % 2**32)),
            engine.put(rows),
            engine.put(np.float32(sampling.temperature or 1.0)),
        )


def has_cache(model: Model) -> bool:
    """Return whether a model gives one token after the other without reading the text before it again."""
    return hasattr(model, "cache") and hasattr(model, "extend")


def _cached(model: Model) -> CachedModel:
    return model if has_cache(model) else Recomputing(model)  # type: ignore[return-value]


def _switch(model: Model) -> int | None:
    """The length beyond which rotary positions change for the whole row, earlier tokens included (LongRope)."""
    kinds = getattr(getattr(model, "config", None), "layer_kinds", ())
    found = {kind.rope.scaling.original for kind in kinds if kind.rope and isinstance(kind.rope.scaling, LongRope)}
    return min(found, default=None)
