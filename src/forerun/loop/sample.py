"""A few words from the trained model: the plainest generation there is, one forward pass per token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.config.schema import Sample
from forerun.data.tokenizer import Tokenizer
from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.program.build import Program


def sample_text(program: Program, params: Any, tokenizer: Tokenizer, sample: Sample, sequence: int, seed: int) -> str:
    """The prompt and its continuation. Compiled once: the window has a fixed length."""
    ids = tokenizer.encode(sample.prompt)[-sequence:].tolist() or [tokenizer.eos]
    rows = program.derived.mesh.data_parallel  # the same row on every data-parallel device
    with jax.set_mesh(program.mesh):
        next_token = jax.jit(_next_token, static_argnums=(0, 1, 5, 7))
        for position in range(sample.tokens):
            window = np.full((rows, sequence), tokenizer.eos, np.int32)
            recent = ids[-sequence:]
            window[:, : len(recent)] = recent
            key = jax.random.fold_in(jax.random.key(seed), position)
            chosen = next_token(
                program.model,
                program.compute,
                params,
                window,
                len(recent) - 1,
                sample.temperature,
                key,
                tokenizer.vocab,
            )
            ids.append(int(chosen))
            if ids[-1] == tokenizer.eos:
                break
    return tokenizer.decode(np.asarray(ids, np.int32))


def _next_token(
    model: Model,
    compute: Compute,
    params: Any,
    tokens_BS: jax.Array,
    last: jax.Array,
    temperature: float,
    key: jax.Array,
    vocab: int,
) -> jax.Array:
    """One token after position `last`; never an id that only fills the embedding up to a round number."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    out = model.apply(params, tokens_BS, jnp.ones_like(tokens_BS), positions, compute)
    hidden = jax.lax.dynamic_slice_in_dim(out.hidden_BSE, last, 1, axis=1)
    logits_V = jnp.einsum("E,VE->V", hidden[0, 0], out.matrix_VE, preferred_element_type=jnp.float32)[:vocab]
    if temperature == 0:
        return jnp.argmax(logits_V)
    return jax.random.categorical(key, logits_V / temperature)
