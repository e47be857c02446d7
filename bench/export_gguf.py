"""Compare exported GGUF files with forerun: llama.cpp loads each file, and its logits and greedy tokens are compared.

    pip install llama-cpp-python gguf            # builds llama.cpp, which takes a few minutes
    python bench/export_gguf.py                  # about 5 minutes on two cores; needs torch and transformers
    python bench/export_gguf.py --only families  # or stories, real; keeps the other results

1. Families: small random models of each family as float32 files, logits of 48 tokens. The context of a model with a
   sliding window that llama.cpp ignores is shorter than the window.
2. Tokenizers: the tokens of text in several scripts, from llama.cpp and from tokenizer.json.
3. stories15M, which has the SentencePiece vocabulary of Llama 2: logits and tokens.
4. SmolLM2-135M-Instruct as f16, q8_0 and q4_k_m: top-1 agreement, KL divergence and greedy answers. The
   same measures for a file that llama.cpp quantized itself.

Writes bench/results/gguf.json.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/gguf.json"
sys.path[:0] = [str(ROOT / place) for place in ("tests", "tests/contract", "tests/support", "tests/unit/data/tokens")]

import jax
import llama_cpp
import numpy as np
from families_reference import VARIANTS, WINDOW, Variant, reference_of
from small_tokenizers import byte_level, saved

import forerun
from forerun.data.tokenizer import checkpoint_tokenizer
from forerun.errors import UserError
from forerun.generate.engine import Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.hub.snapshot import Snapshot
from forerun.models.families.registry import read_config
from forerun.models.model_facts import model_for
from forerun.nn.compute import Compute
from forerun.program.build import make_mesh
from forerun.trained_model.load_model import abstract_plain_params
from forerun.weights_io.gguf.gguf_file import write_gguf
from forerun.weights_io.packed import opened_snapshot
from forerun.weights_io.read import read_params
from real_weights.folders import smollm2_folder, stories_folder

TOKENS = 48
ANSWER_TOKENS = 24
VOCAB = 384
F32_CACHE = 0  # GGML_TYPE_F32: llama.cpp rounds its cache to float16 by default
TEXT = (
    "The ferry left at 6:45, eleven minutes late, with forty-three bicycles and a brass band asleep on deck. A child "
    "counted the lighthouses: one, two, five, no, four. The capital of France is Paris, and water boils at 100 °C.\n"
    "def tide(hour):\n    return 1.8 + 0.7 * sin(hour * 3.1416 / 6.21)\n"
)
SCRIPTS = (
    TEXT,
    "I've, we'LL, don't; 3 33 333 3333; naïve café; 日本語と中文; Привет, мир!  two  spaces\t\ttabs\n\n\nlines 😀🚀",
)
STORY = "Once upon a time there was a small dog named Max. Max liked to run in the park with his friend Tom."
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one sentence about the sea.")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", choices=("families", "stories", "real"))
    asked = arguments.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found |= {"llama_cpp_python": llama_cpp.__version__, "jax": jax.__version__}
    with tempfile.TemporaryDirectory() as work:
        if asked.only in (None, "families"):
            found["families"] = {}
            for name in VARIANTS:
                found["families"][name] = family_result(name, Path(work) / name)
                print(name, json.dumps(found["families"][name]), flush=True)
        if asked.only in (None, "stories"):
            made = write_gguf(stories_folder(), Path(work) / "stories.gguf", "f32", name="stories", ends=[2])
            found["stories15m"] = compared(stories_folder(), made.path, STORY)
            print(json.dumps(found["stories15m"]))
        if asked.only in (None, "real"):
            found["smollm2-135m-instruct"] = real_result(Path(work))
            print(json.dumps(found["smollm2-135m-instruct"], indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def gguf_variant(variant: Variant) -> Variant:
    """Return the variant with the vocabulary of the small tokenizer, and with the queries' scale of llama.cpp."""
    changes = dict(variant.changes)
    if "query_pre_attn_scalar" in changes:
        changes["query_pre_attn_scalar"] = changes["head_dim"]
    return replace(variant, changes=changes, dimensions={**variant.dimensions, "vocab_size": VOCAB})


def family_result(name: str, folder: Path) -> dict[str, Any]:
    reference = reference_of(gguf_variant(VARIANTS[name]))
    reference.save_pretrained(folder)
    saved(byte_level(), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    try:
        made = write_gguf(folder, folder / "model.gguf", "f32", name=name, ends=[0])
    except UserError as error:
        return {"rejected": error.why}
    limited = any("sliding window" in note for note in made.notes)
    ids = np.random.default_rng(0).integers(9, 300, WINDOW if limited else TOKENS).tolist()
    # LongRoPE: llama.cpp uses the long factors if its context is longer than the original one, forerun if the text is.
    return compared(folder, made.path, ids)


def compared(folder: Path, path: Path, text: list[int] | str) -> dict[str, Any]:
    """Return the differences between the logits of forerun and of llama.cpp, and whether the tokenizers are equal."""
    ids = text
    if isinstance(ids, str):
        ids = checkpoint_tokenizer(Snapshot(str(folder), folder, None)).encode(ids).tolist()
    ours, theirs = forerun_logits(folder, ids), llama_logits(path, ids)
    return {
        "tokens": len(ids),
        "max_difference": float(np.abs(ours - theirs).max()),
        "largest_logit": float(np.abs(ours).max()),
        "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        "tokenizer_equal": tokenizer_equal(folder, path),
    }


def real_result(work: Path) -> dict[str, Any]:
    folder = smollm2_folder()
    tokenizer = checkpoint_tokenizer(Snapshot(str(folder), folder, None))
    ids = tokenizer.encode(TEXT * 2).tolist()
    ours = forerun_logits(folder, ids)
    answers = forerun_answers(folder)
    results: dict[str, Any] = {"tokens": len(ids)}
    files = {}
    for kind in ("f16", "q8_0", "q4_k_m"):
        made = write_gguf(folder, work / f"{kind}.gguf", kind, name="smollm2", ends=[2])
        files[kind] = made.path
        results[kind] = {"weights_rms_error": made.error, "notes": list(made.notes)}
    files["q4_k_m by llama.cpp"] = quantized_by_llama(files["f16"], work / "theirs.gguf")
    results["q4_k_m by llama.cpp"] = {}
    for kind, path in files.items():
        theirs = llama_logits(path, ids)
        results[kind] |= {
            "file_bytes": path.stat().st_size,
            "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
            "mean_kl_nats": float(kl(ours, theirs).mean()),
            "max_difference": float(np.abs(ours - theirs).max()),
            "equal_first_tokens_of_answers": [
                equal_start(mine, llama_answer(path, prompt, len(mine))) for prompt, mine in answers
            ],
            "answer_tokens": [len(mine) for _, mine in answers],
            "tokenizer_equal": tokenizer_equal(folder, path),
        }
    return results


def forerun_logits(folder: Path, ids: list[int]) -> np.ndarray:
    snapshot = Snapshot(str(folder), folder, None)
    family, config = read_config(snapshot.config(), "config.json")
    model: Any = model_for(config)
    mesh = make_mesh(MeshShape(1, 1, 1), jax.devices("cpu")[:1])
    with opened_snapshot(snapshot) as weights:
        params = read_params(weights, family.table, model, abstract_plain_params(model, mesh, "float32"))
    tokens = np.asarray([ids], np.int32)
    where = np.arange(len(ids), dtype=np.int32)[None]
    with jax.set_mesh(mesh):
        run = jax.jit(lambda p: model.apply(p, tokens, np.ones_like(tokens), where, Compute()).logits()[0])
        return np.asarray(run(params))


def forerun_answers(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt and of forerun's greedy answer, without the end token."""
    model = forerun.load_model(str(folder), device="cpu", devices=1, dtype="float32")
    found = []
    for question in QUESTIONS:
        (prompt,) = model.chat_ids([[{"role": "user", "content": question}]])
        steps = list(Stream(model.engine, [prompt], Settings(ANSWER_TOKENS, Sampling(0))))
        found.append((list(prompt), [int(token) for (token,) in steps if token is not None]))
    return found


def opened_llama(path: Path, context: int) -> Any:
    return llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_batch=context,
        n_threads=2,
        logits_all=True,
        verbose=False,
        type_k=F32_CACHE,
        type_v=F32_CACHE,
    )


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    model = opened_llama(path, len(ids))
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def llama_answer(path: Path, prompt: list[int], tokens: int) -> list[int]:
    model = opened_llama(path, len(prompt) + tokens)
    model.eval(prompt)
    answer: list[int] = []
    for _ in range(tokens):
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        answer.append(token)
        model.eval([token])
    return answer


def tokenizer_equal(folder: Path, path: Path) -> bool:
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return all(
        model.tokenize(text.encode(), add_bos=False, special=True) == inner.encode(text, add_special_tokens=False).ids
        for text in SCRIPTS
    )


def quantized_by_llama(source: Path, target: Path) -> Path:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    settings.nthread = 2
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if code:
        raise RuntimeError(f"llama.cpp could not quantize {source}: {code}")
    return target


def equal_start(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def kl(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the KL divergence of `other` from `one` at each position, in nats."""
    p, q = (x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True) for x in (one, other))
    return (np.exp(p) * (p - q)).sum(-1)


if __name__ == "__main__":
    main()
