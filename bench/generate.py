"""What generation costs beside the model: tokens/s of the whole stream over the bare compiled decode step.

    python bench/generate.py            # about 5 minutes on two idle cores

A model of SmolLM2-135M's size with random weights, float32 on the CPU, one row and eight. Bare is the engine's own
compiled step called in a loop on fixed tokens and positions, nothing read back before the end. The stream is what
`forerun generate` runs: cache kept by the engine, tokens read every step, words made of them, rows watched. Both in
turns in one process, so that a noisy machine hurts both alike. Writes bench/results/generate.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forerun.generate.engine import Chooser, Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.writing import Writing
from forerun.hardware.mesh import MeshShape
from forerun.models.decoder import Decoder
from forerun.models.sizes import SIZES
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.program.build import make_mesh

ROOT = Path(__file__).parent
MODEL = "smollm2-135m"
ROUNDS, TOKENS, PROMPT = 7, 32, 32
GOAL = 0.8
SAMPLINGS = {"greedy": Sampling(0), "top-p 0.9": Sampling(0.8, top_p=0.9)}


def main() -> None:
    model = Decoder(SIZES[MODEL])
    params = jax.jit(lambda key: spec.initial(model.specs(), key))(jax.random.key(0))
    mesh = make_mesh(MeshShape(1, 1, 1), jax.devices("cpu")[:1])
    engine = Engine(model, params, mesh, Compute(), frozenset(), model.vocab)
    results = [measured(engine, rows, name) for rows in (1, 8) for name in SAMPLINGS]
    result = {
        "model": f"{MODEL}, random weights, float32, one CPU device",
        "prompt_tokens": PROMPT,
        "new_tokens": TOKENS,
        "rounds": ROUNDS,
        "goal": GOAL,
        "results": results,
        "load_average": os.getloadavg()[1],  # above 2 on two cores, the figures say little
        "jax": jax.__version__,
    }
    print(json.dumps(result, indent=2))
    (ROOT / "results/generate.json").write_text(json.dumps(result, indent=2) + "\n")
    worst = min(one["ratio_of_medians"] for one in results)
    if worst < GOAL:
        raise SystemExit(f"{worst:.2f} of the bare step, wanted {GOAL}")


def measured(engine: Engine, rows: int, sampling: str) -> dict[str, Any]:
    """Tokens/s of both in turns. The bare step is greedy: the model and nothing else."""
    prompts = np.random.default_rng(0).integers(0, engine.vocab, (rows, PROMPT)).tolist()
    greedy, wanted = Settings(TOKENS, SAMPLINGS["greedy"]), Settings(TOKENS, SAMPLINGS[sampling])
    bare(engine, prompts, greedy), streamed(engine, prompts, wanted)  # compile
    pairs = [(bare(engine, prompts, greedy), streamed(engine, prompts, wanted)) for _ in range(ROUNDS)]
    alone, whole = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    return {
        "rows": rows,
        "sampling": sampling,
        "bare_tokens_per_second": round(alone, 2),
        "stream_tokens_per_second": round(whole, 2),
        "ratio_of_medians": round(whole / alone, 3),
        "ratio_per_round": [round(after / before, 3) for before, after in pairs],
    }


def bare(engine: Engine, prompts: list[list[int]], settings: Settings) -> float:
    """The compiled step on tokens and positions that never change."""
    chooser = Chooser(engine, settings, np.arange(len(prompts), dtype=np.uint32))
    place = engine.begin(prompts, TOKENS, chooser)
    tokens_B, positions_B, cache = place.tokens_B, place.positions_B, place.cache
    alive_B = engine.put(np.ones(len(prompts), bool))
    jax.block_until_ready(cache)
    with jax.set_mesh(engine.mesh):
        began = time.perf_counter()
        for _ in range(TOKENS):
            chosen_B, _, cache = engine.step(
                engine.params, tokens_B, positions_B, alive_B, cache, *chooser.arguments, rule=chooser.rule
            )
        jax.block_until_ready((chosen_B, cache))
        return TOKENS * len(prompts) / (time.perf_counter() - began)


def streamed(engine: Engine, prompts: list[list[int]], settings: Settings) -> float:
    """From the first token on, so that reading the prompt is left out of both; that one is not counted."""

    def words(ids: list[int]) -> str:
        return "".join(f" {token}" for token in ids)

    began, count = 0.0, 0
    for _ in Writing(engine, prompts, settings, words):
        count += 1
        if count == len(prompts):
            began = time.perf_counter()
    return (count - len(prompts)) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
