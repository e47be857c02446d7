"""Gradient error of top-K distillation: a student's gradient with K teacher tokens and their tail, and with all tokens.

    PYTHONPATH=src:tests python bench/distil_top_k.py stories15m            # minutes on two cores
    PYTHONPATH=src:tests python bench/distil_top_k.py smollm2

The teacher is a real model (see tests/real_weights). The student is the same model with every matrix rounded to 4 bits
per column, as at the start of recovery training. The text is Alice in Wonderland (quickstart). The gradient is that of
T^2 KL with respect to all of the student's weights; the error is |g_K - g| / |g|. `without` omits the tail and
normalises the K probabilities to one, as is common. Values are rounded to 16 bits as in a cache. Prints a table and
writes bench/results/distil_top_k_MODEL.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.config import schema
from forerun.data.teacher_cache import Layout
from forerun.data.tokenizer import checkpoint_tokenizer
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Readout
from forerun.models.model_facts import ModelFacts, model_of, pretrained
from forerun.nn.compute import Compute
from forerun.nn.weights.dense import Dense, map_weights
from forerun.objectives.distil import (
    HIDDEN,
    IDS,
    MATRIX,
    TAIL,
    VALUES,
    CachedTeacherLoss,
    LiveTeacherLoss,
    Rule,
    chunked,
)
from forerun.program.build import make_mesh
from forerun.program.recording import record
from forerun.trained_model.load_model import abstract_plain_params, pretrained_params
from real_weights import folders

ROOT = Path(__file__).parent
TEXT = ROOT.parent / "examples" / "quickstart" / "text" / "carroll-alice.txt"
MODELS = {"stories15m": (folders.stories_folder, 2, 256), "smollm2": (folders.smollm2_folder, 1, 256)}
KEPT = (4, 16, 64, 256, 1024, 4096)
TEMPERATURES = (1.0, 2.0)
CHUNK = 32


def rounded(params: Any) -> Any:
    """Return the parameters with every matrix rounded to 16 levels per column."""

    def leaf(weight: Any) -> Any:
        if not isinstance(weight, Dense):
            return weight
        x = weight.value
        step = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 7.5
        return Dense(step * jnp.clip(jnp.round(x / step), -8, 7))

    return map_weights(leaf, params)


def main(name: str) -> None:
    folder, rows, sequence = MODELS[name]
    section = schema.Model(name=str(folder()))
    model = model_of(section)
    mesh = make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    teacher = pretrained_params(ModelFacts(section), abstract_plain_params(model, mesh, "float32"))
    student = rounded(teacher)
    ids = checkpoint_tokenizer(pretrained(section).snapshot).encode(TEXT.read_text()[2000:30_000])
    tokens = jnp.asarray(ids[: rows * sequence].reshape(rows, sequence), jnp.int32)
    where = jnp.broadcast_to(jnp.arange(sequence, dtype=jnp.int32), tokens.shape)
    weights = jnp.ones(tokens.shape, jnp.float32)

    def applied(params: Any) -> Any:
        return model.apply(params, tokens, jnp.ones_like(tokens), where, Compute())

    def gradient(rule: Rule, sides: Any, tables: Any) -> tuple[float, np.ndarray]:
        """Return the loss and the flat gradient. The network's backward pass is separate, so it is compiled once."""

        def loss(hidden: jax.Array, matrix: jax.Array, sides: Any, tables: Any) -> jax.Array:
            return chunked(rule, hidden, matrix, weights, sides, tables, CHUNK)["loss"] / weights.size

        found, slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*ends, sides, tables)
        return float(found), np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(backward(student, slopes))])

    def said(params: Any) -> tuple[jax.Array, jax.Array]:
        out = applied(params)
        return out.hidden_BSE, out.matrix_VE

    @jax.jit
    def backward(params: Any, slopes: Any) -> Any:
        return jax.vjp(said, params)[1](slopes)[0]

    ends = jax.jit(said)(student)
    hidden, matrix = jax.jit(said)(teacher)
    results = []
    for temperature in TEMPERATURES:
        loss, whole = gradient(LiveTeacherLoss(1.0, temperature, model.vocab), {HIDDEN: hidden}, {MATRIX: matrix})
        for top_k in (*KEPT, model.vocab):
            began = time.monotonic()

            def kept(hidden: jax.Array, matrix: jax.Array, top_k: int = top_k, temperature: float = temperature) -> Any:
                out = Readout(hidden, matrix)
                return record(out, vocab=model.vocab, top_k=top_k, temperatures=(temperature,), chunk=CHUNK)

            values, numbers, tails = jax.jit(kept)(hidden, matrix)
            sides = {VALUES: values, IDS: numbers, TAIL: tails[..., 0]}
            near, some = gradient(CachedTeacherLoss(1.0, temperature), sides, {})
            _, bare = gradient(CachedTeacherLoss(1.0, temperature), {**sides, TAIL: jnp.zeros_like(tails[..., 0])}, {})
            row = {
                "model": name,
                "temperature": temperature,
                "top_k": top_k,
                "bytes_per_token": Layout(1, 1, top_k, model.vocab, (temperature,)).row_bytes - 4,
                "tail_mass": float(jnp.mean(tails)),
                "loss": near,
                "loss_whole": loss,
                "gradient_error": float(np.linalg.norm(some - whole) / np.linalg.norm(whole)),
                "cosine": float(some @ whole / np.linalg.norm(some) / np.linalg.norm(whole)),
                "gradient_error_without": float(np.linalg.norm(bare - whole) / np.linalg.norm(whole)),
                "seconds": time.monotonic() - began,
            }
            results.append(row)
            print(json.dumps(row), flush=True)
    (ROOT / "results" / f"distil_top_k_{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| K | bytes a token | T | mass in the tail | gradient error | cosine | error without the tail |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results:
        lines.append(
            f"| {row['top_k']:,} | {row['bytes_per_token']:,} | {row['temperature']:g} | {row['tail_mass']:.2g} | "
            f"{row['gradient_error']:.2g} | {row['cosine']:.5f} | {row['gradient_error_without']:.2g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1])
