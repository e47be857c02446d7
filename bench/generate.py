"""Compare the CPU time of a decoded token with transformers': float32, greedy, one thread, alternately in one process.

    python bench/generate.py                     # about 10 minutes on two idle cores; needs torch and transformers
    python bench/generate.py --model 132M --rounds 3 --tokens 16 --case 1x512    # one case, not recorded

Both read the same two models, which have random weights and the architecture of Qwen3. forerun is the stream that
`forerun generate` uses, with its cache and a token read at every step; transformers is `model.generate` with its cache.
A ratio is the CPU time of forerun over that of transformers, the median of the rounds; the goal is at most 1. The time
to read the prompt is measured separately. The greedy tokens of both must be equal. Writes bench/results/generate.json.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"  # before jax: one thread, as torch below
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from forerun.config import schema
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.models.model_facts import ModelFacts, model_of
from forerun.nn.compute import Compute
from forerun.program.build import make_mesh
from forerun.trained_model.load_model import abstract_plain_params, pretrained_params

ROOT = Path(__file__).parent
VOCAB = 32000
GOAL = 1.0
CASES = ("1x64", "1x512", "16x64", "16x512")
MODELS = {
    "54M": {"num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4},
    "132M": {"num_hidden_layers": 32, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", choices=MODELS, action="append")
    arguments.add_argument("--case", choices=CASES, action="append")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokens", type=int, default=32)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    models, cases = asked.model or list(MODELS), asked.case or list(CASES)
    results = []
    for name in models:
        reference, engine = both(name)
        for case in cases:
            rows, prompt = map(int, case.split("x"))
            results.append({"model": name, **measured(reference, engine, rows, prompt, asked.tokens, asked.rounds)})
            print(json.dumps(results[-1]), flush=True)
    if asked.model or asked.case:
        return
    record = {
        "what": "CPU time, float32, greedy, one thread, forerun over transformers",
        "new_tokens": asked.tokens,
        "rounds": asked.rounds,
        "goal": GOAL,
        "results": results,
        "load_average": os.getloadavg()[1],
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (ROOT / "results/generate.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    worst = max(one["ratio_per_token"] for one in results)
    if worst > GOAL:
        raise SystemExit(f"{worst:.2f} of transformers' CPU time per token, wanted {GOAL}")


def both(name: str) -> tuple[Any, Engine]:
    """Return a model with random weights in transformers, and an engine of forerun with the same weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, max_position_embeddings=4096, head_dim=64, intermediate_size=1536, **MODELS[name]
    )
    config.tie_word_embeddings = True
    reference = transformers.Qwen3ForCausalLM(config).float().eval()
    reference.generation_config.eos_token_id, reference.generation_config.pad_token_id = None, 0
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        section = schema.Model(name=folder)
        model, mesh = model_of(section), make_mesh(MeshShape(1, 1, 1), jax.devices("cpu")[:1])
        params = pretrained_params(ModelFacts(section), abstract_plain_params(model, mesh, "float32"))
        jax.block_until_ready(params)
    return reference, Engine(model, params, mesh, Compute(jnp.dtype("float32")), frozenset(), VOCAB, consume=True)


def measured(reference: Any, engine: Engine, rows: int, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Compare the tokens once, then the CPU times alternately."""
    prompts = np.random.default_rng(0).integers(3, VOCAB, (rows, prompt)).tolist()
    expected, *_ = theirs(reference, prompts, 8)
    found, *_ = ours(engine, prompts, tokens)  # compile
    if [row[:8] for row in found] != expected:
        raise SystemExit(f"{rows} x {prompt}: the greedy tokens are not those of transformers")
    pairs = [(ours(engine, prompts, tokens)[1:], theirs(reference, prompts, tokens)[1:]) for _ in range(rounds)]
    (our_first, our_rest), (their_first, their_rest) = (
        [statistics.median(values) for values in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
    )
    return {
        "rows": rows,
        "prompt": prompt,
        "ms_per_token": round(our_rest * 1e3, 2),
        "ms_per_token_transformers": round(their_rest * 1e3, 2),
        "ratio_per_token": round(statistics.median(one[1] / other[1] for one, other in pairs), 3),
        "ratio_per_round": [round(one[1] / other[1], 3) for one, other in pairs],
        "ratio_first_token": round(our_first / their_first, 3),
    }


def ours(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
    """Return the tokens of each row, the CPU seconds until the first token, and those of each step after it."""
    began = time.process_time()
    stream = Stream(engine, prompts, Settings(tokens, Sampling(0)))
    steps = [next(stream)]
    first = time.process_time()
    steps += stream
    rest = (time.process_time() - first) / (tokens - 1)
    return [[int(step[row] or 0) for step in steps] for row in range(len(prompts))], first - began, rest


def theirs(reference: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
    """Return the same for transformers. A stopping criterion that never stops records the time of each token."""
    ids, noted = torch.tensor(prompts), []

    def note(ids: Any, scores: Any, **_: Any) -> Any:
        noted.append(time.process_time())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    began = time.process_time()
    with torch.no_grad():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
        )
    return out[:, ids.shape[1] :].tolist(), noted[0] - began, (noted[-1] - noted[0]) / (tokens - 1)


if __name__ == "__main__":
    main()
