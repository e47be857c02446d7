"""Published runs that the step-time model is developed with, as forerun jobs.

Each run was measured on real TPUs and published with its dimensions. It is compiled as it was compiled: with the flags,
the attention and the layers of its framework at that date. All of these runs were visible during the work on the model.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flags
from tpu_worker import LOOP, PLAIN

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile.request import CompileRequest, requests_of
from forerun.resolve.resolved_job import ResolvedJob

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published.csv"
TOKENIZER_VOCAB = 128_256  # the Llama 3 tokenizer, of all Marin runs
SHORTEST_SECONDS = 0.1  # shorter Marin steps measure the loader, the logging and Python
IN_VECTOR_MEMORY = "attention in loops over blocks, whose scores today's compiler keeps in vector memory"
MARIN_FLAGS_UNTIL = "2025-09-25"


@dataclass(frozen=True)
class Run:
    name: str
    family: str
    slice: str
    seconds: float  # per optimizer step, as published or by the formula in `derived`
    source: str
    job: dict[str, Any]
    derived: str = ""  # how `seconds` was computed, if it was not published
    note: str = ""
    unlike: str = ""  # why forerun has no equivalent program; such a run is listed, but in no calibration or summary
    flags: flags.Flags | None = None  # of the measured program; None: forerun's own options
    kernel: dict[str, Any] | None = None  # settings of its attention kernel, if they are not forerun's own
    layers: str = ""  # of published_layers.py, if they are not forerun's own

    @property
    def generation(self) -> str:
        return slice_named(self.slice).chip.name

    def as_forerun_compiles(self) -> Run:
        """Return the run with forerun's own compiler options."""
        return replace(self, flags=None)

    def variants(self) -> list[Run]:
        """Return the run and, if its flags are not certain, the run with the other flags."""
        other = self.flags.alternative if self.flags else None
        return [self, replace(self, flags=other)] if other else [self]

    def question(self) -> CompileRequest:
        content = {"name": "accuracy", "data": "none", "steps": 1000, **self.job}
        job = Job.model_validate_json(json.dumps(content))
        return requests_of(ResolvedJob(job), [slice_named(self.slice)])[0]


def runs() -> list[Run]:
    return [*trillium(), *v5p_recipe(), *ironwood(), *maxtext_defaults(), *v4_maxtext(), *marin(), *tpuchat()]


# Runs of AI-Hypercomputer's tpu-recipes (MaxText).
_RECIPES = "AI-Hypercomputer/tpu-recipes@c8cfe2f:training"
_QKV = ("layer_in", "query", "key", "value")
_LLAMA_405B = {
    "layers": 126,
    "embed": 16384,
    "heads": 128,
    "kv_heads": 8,
    "head_dim": 128,
    "mlp": 53248,
    "vocab": 128256,
    "tied": False,
}
_LLAMA2_70B = {**_LLAMA_405B, "layers": 80, "embed": 8192, "heads": 64, "mlp": 28672, "vocab": 32000}


def _named(offload: tuple[str, ...] = (), keep: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"policy": "named", "offload": list(offload), "keep": list(keep)}


# Their blocks are 1,024 or 2,048 queries by 512 keys; forerun's are square.
_UNFUSED_V6E = {"name": "splash", "block": 1024}


def trillium() -> list[Run]:
    found = []
    # The 8B recipes also offload the out projection's output, which forerun does not name: it is computed again.
    offloaded = _named(_QKV)
    for chips, each, seconds in (  # the recipes for up to 32 chips switch windowed einsums off
        (8, 3, 3.443),
        (16, 3, 3.393),
        (32, 3, 3.495),
        (64, 5, 5.652),
        (128, 4, 4.602),
        (256, 4, 4.546),
    ):
        found.append(
            Run(
                f"llama3.1-8b v6e-{chips}",
                "tpu-recipes/llama3.1-8b",
                f"v6e-{chips}",
                seconds,
                f"{_RECIPES}/trillium/Llama3.1-8B-MaxText/v6e-{chips}/README.md",
                {"model": "llama3.1-8b", "sequence": 8192, "batch": each * chips, "remat": offloaded},
                flags=flags.TRILLIUM_8B_NO_WINDOWS if chips <= 32 else flags.TRILLIUM_8B,
            )
        )
    found.append(
        Run(
            "mistral-7b v6e-8",
            "tpu-recipes/mistral-7b",
            "v6e-8",
            6.32,
            f"{_RECIPES}/trillium/Mistral-7B-MaxText/README.md",
            # MaxText's mistral-7b attends to the complete sequence.
            {
                "model": {**_LLAMA_405B, "layers": 32, "embed": 4096, "heads": 32, "mlp": 14336, "vocab": 32000},
                "sequence": 8192,
                "batch": 48,
                "remat": offloaded,
            },
            flags=flags.TRILLIUM_MISTRAL,
        )
    )
    for chips, each, seconds, bf16 in (
        (32, 2, 17.79, True),
        (64, 2, 18.688, False),
        (128, 4, 34.786, False),
        (256, 5, 42.656, False),
    ):
        job: dict[str, Any] = {
            "model": "llama3.1-70b",
            "sequence": 8192,
            "batch": each * chips,
            "remat": _named(_QKV),
        }
        if bf16:
            job["precision"] = {"params": "bfloat16"}
        found.append(
            Run(
                f"llama3.1-70b v6e-{chips}",
                "tpu-recipes/llama3.1-70b",
                f"v6e-{chips}",
                seconds,
                f"{_RECIPES}/trillium/Llama3.1-70B-MaxText/v6e-{chips}/README.md",
                job,
                note="bf16 weights" if bf16 else "",
                flags=flags.TRILLIUM_70B_NO_WINDOWS if chips == 32 else flags.TRILLIUM_70B,
            )
        )
    found.append(
        Run(
            "llama2-70b v6e-256",
            "tpu-recipes/llama2-70b",
            "v6e-256",
            9.052,
            f"{_RECIPES}/trillium/Llama2-70B-MaxText/README.md",
            # The source names two batches: 3 and, by its tokens/s, 2 sequences a chip; 9.052 s x 905 tokens/s = 2.
            {
                "model": _LLAMA2_70B,
                "sequence": 4096,
                "batch": 512,
                "remat": _named(("query", "key", "value")),
            },
            note="batch from published tokens/s (2 a chip; its table says 3)",
            flags=flags.TRILLIUM_LLAMA2,
            kernel=_UNFUSED_V6E,
        )
    )
    found.append(
        Run(
            "gpt3-175b v6e-256",
            "tpu-recipes/gpt3-175b",
            "v6e-256",
            17.182,
            f"{_RECIPES}/trillium/GPT3-175B-MaxText/bf16/README.md",
            {
                "model": {
                    "layers": 96,
                    "embed": 12288,
                    "heads": 96,
                    "kv_heads": 96,
                    "head_dim": 128,
                    "mlp": 49152,
                    "vocab": 50304,
                    "tied": True,
                },
                "sequence": 2048,
                "batch": 768,
                "remat": "full",
            },
            layers="sequential",
            flags=flags.TRILLIUM_GPT3,
            kernel=_UNFUSED_V6E,
        )
    )
    return found


def v5p_recipe() -> list[Run]:
    return [
        Run(
            "llama3.1-405b v5p-1024",
            "tpu-recipes/llama3.1-405b v5p",
            "v5p-1024",
            131.474,
            f"{_RECIPES}/v5p/Llama3.1-405B-MaxText",
            {
                "model": _LLAMA_405B,
                "sequence": 8192,
                "batch": 1024,
                "remat": _named(("attention_out",)),
            },
            flags=flags.V5P_405B,
            kernel={"name": "splash", "block": 2048},
            note="its recipe also offloads the MLP's output, which forerun does not name",
        )
    ]


def ironwood() -> list[Run]:
    """Return the runs on tpu7x, which has 2 devices per chip."""
    kept = _named(keep=(*_QKV, "attention_out"))
    found = [
        Run(
            f"llama3.1-70b tpu7x-{topology}",
            "tpu-recipes/llama3.1-70b tpu7x",
            f"tpu7x-{topology}",
            seconds,
            f"{_RECIPES}/ironwood/README.md, llama3.1-70b/8k-bf16-tpu7x-4x4x4/run_recipe.sh",
            {"model": "llama3.1-70b", "sequence": 8192, "batch": batch, "remat": kept},
            flags=flags.IRONWOOD_70B,
            kernel={"name": "splash", "block": 2048, "fused_backward": True},
        )
        for topology, batch, seconds in (("4x4x4", 256, 12.20), ("4x8x8", 1024, 12.27))
    ]
    found.append(
        Run(
            "llama3.1-405b tpu7x-4x8x8",
            "tpu-recipes/llama3.1-405b tpu7x",
            "tpu7x-4x8x8",
            98.34,
            f"{_RECIPES}/ironwood/README.md, llama3.1-405b/8k-bf16-tpu7x-4x8x8/run_recipe.sh",
            {
                "model": _LLAMA_405B,
                "sequence": 8192,
                "batch": 1536,
                "remat": _named(("layer_in",), ("key", "value")),
            },
            flags=flags.IRONWOOD_405B,
            kernel={"name": "splash", "block": 2048, "fused_backward": True},
            note="its recipe also offloads the MLP's output, which forerun does not name",
        )
    )
    return found


# MaxText published its tables for v4, v5e and v5p in 2023. Its default model had two MLP matrices in parallel with
# attention, heads of 256 and tied embeddings then, and its scripts had other batches than today's. The formula for
# TFLOP/s is that of the commit that published a table.
_MAXTEXT_2023 = {"v4": "281e04bf3", "v5e": "9bc243c95", "v5p": "76bd53b0f"}
_ATTENTION_FLOPS = {"v4": 0.0, "v5e": 12.0, "v5p": 6.0}  # times layers x heads x head width x sequence, per token


def _default_size(scale: int) -> dict[str, int]:
    """Return the sizes of MaxText's `global_parameter_scale` of 2023: heads and mlp double, then embed, then layers."""
    base, rest = divmod(scale.bit_length() - 1, 3)
    wide = base + (rest > 0)
    sizes = {"layers": 16 << base, "embed": 2560 << (base + (rest > 1)), "heads": 8 << wide, "mlp": 8192 << wide}
    return sizes | {"head_dim": 256, "vocab": 32768}


def published_flops(sizes: dict[str, int], sequence: int, attention_flops: float) -> float:
    """Return the FLOPs per token as MaxText counted: 6 per weight, and attention by the formula of its date."""
    width = sizes["heads"] * sizes["head_dim"]
    layer = sizes["embed"] * (4 * width + 2 * sizes["mlp"])
    weights = sizes["layers"] * layer + sizes["vocab"] * sizes["embed"]
    return 6.0 * weights + attention_flops * sizes["layers"] * width * sequence


def _from_tflops(sizes: dict[str, int], generation: str, each: float, tflops: float) -> tuple[float, str]:
    factor = _ATTENTION_FLOPS[generation]
    seconds = published_flops(sizes, 2048, factor) * 2048 * each / (tflops * 1e12)
    attention = f" + {factor:g} L H D S" if factor else ""
    return seconds, f"(6 N{attention}) x {each:g} x 2048 tokens / {tflops:g} TFLOP/s"


def maxtext_defaults() -> list[Run]:
    """Return MaxText's default sizes on v5e and v5p, with the scripts of the commits that published the tables."""
    found = []
    for generation, chips, scale, each, tp, remat, tflops in (
        ("v5e", 256, 16, 6, 1, "full", 120),
        ("v5e", 256, 32, 4, 1, "full", 132),
        ("v5e", 256, 64, 2, 1, "full", 118),
        ("v5e", 256, 128, 1, 16, "full", 110),
        ("v5p", 64, 32, 8, 4, "dots", 328),
        ("v5p", 64, 64, 4, 4, "dots", 323),
        ("v5p", 128, 128, 2, 8, "dots", 315),
        ("v5p", 256, 128, 2, 8, "dots", 316),
        ("v5p", 512, 256, 2, 8, "dots", 308),
        ("v5p", 512, 512, 2, 16, "full", 294),
        ("v5p", 1024, 1024, 2, 16, "full", 254),
        ("v5p", 2048, 1024, 2, 16, "full", 297),
    ):
        sizes = _default_size(scale)
        seconds, formula = _from_tflops(sizes, generation, each, tflops)
        name = f"{generation}-{chips * (2 if generation == 'v5p' else 1)}"
        place = "configs/v5p" if generation == "v5p" else "configs/largest_job"
        found.append(
            Run(
                f"default-{scale}b {name}",
                f"maxtext/default {generation} {'tp' if tp > 1 else 'fsdp'}",
                name,
                seconds,
                f"AI-Hypercomputer/maxtext@{_MAXTEXT_2023[generation]}:MaxText/{place}/{scale}b.sh and base.yml",
                {
                    "model": {**sizes, "kv_heads": sizes["heads"], "tied": True},
                    "sequence": 2048,
                    "batch": each * chips,
                    "mesh": {"tp": tp},
                    "remat": remat,
                },
                derived=formula,
                layers="parallel",
                flags=flags.DEFAULT_V5E if generation == "v5e" else flags.DEFAULT_V5P,
            )
        )
    return found


def v4_maxtext() -> list[Run]:
    """Return MaxText's v4 runs of April 2023."""
    found = []
    for scale, script, slice_name, chips, each, layers, embed, heads, mlp, tflops in (
        (22, "v4-128", "v4-128", 64, 16, 48, 6144, 24, 24576, 156),
        (52, "v4-384", "v4:4x4x12", 192, 10, 32, 12288, 32, 49152, 154),
    ):
        sizes = {"layers": layers, "embed": embed, "heads": heads, "mlp": mlp, "head_dim": 256, "vocab": 32768}
        seconds, formula = _from_tflops(sizes, "v4", each, tflops)
        found.append(
            Run(
                f"default-{scale}b {slice_name}",
                "maxtext/default v4",
                slice_name,
                seconds,
                f"AI-Hypercomputer/maxtext@{_MAXTEXT_2023['v4']}:README.md and MaxText/configs/1x{script}.sh",
                {
                    "model": {**sizes, "kv_heads": heads, "tied": True, "qk_norm": True},
                    "sequence": 2048,
                    "batch": each * chips,
                    "remat": "full",
                    "attention": "xla",
                },
                derived=formula,
                layers="parallel",
                flags=flags.DEFAULT_V4,
                kernel=PLAIN,
            )
        )
    return found


def marin() -> list[Run]:
    """Return speedruns of marin-community: Levanter, FSDP, float32 weights, bfloat16 compute, full remat.

    Splash attention did not support heads of 64 in August 2025 (jax issue 30861). Levanter used its own loop over
    blocks instead (models/flash_attention.py), which loop_attention.py compiles.
    """
    found = []
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            name = row["run"]
            sizes = {key: int(row[key]) for key in ("hidden", "layers", "heads", "kv_heads", "intermediate")}
            model = {
                "layers": sizes["layers"],
                "embed": sizes["hidden"],
                "heads": sizes["heads"],
                "kv_heads": sizes["kv_heads"],
                "head_dim": sizes["hidden"] // sizes["heads"],
                "mlp": sizes["intermediate"],
                "vocab": TOKENIZER_VOCAB,
                "tied": False,
                "qk_norm": "qwen3" in name,
            }
            found.append(
                Run(
                    f"{name} {row['hardware']}",
                    "marin/" + row["family"],
                    row["hardware"],
                    float(row["step_s"]),
                    f"marin-community/marin experiments/speedrun, {row['date']}",
                    {
                        "model": model,
                        "sequence": int(row["seq"]),
                        "batch": int(row["global_batch_seqs"]),
                        "remat": "full",
                        "attention": "auto" if model["head_dim"] % 128 == 0 else "xla",
                    },
                    kernel=None if model["head_dim"] % 128 == 0 else LOOP,
                    unlike="" if model["head_dim"] % 128 == 0 else IN_VECTOR_MEMORY,
                    flags=flags.MARIN if row["date"] < MARIN_FLAGS_UNTIL else flags.MARIN_LATER,
                )
            )
    return found


def tpuchat() -> list[Run]:
    """Return the runs of a notebook on one chip: 16 micro-batches of 4, all in bfloat16, nothing recomputed."""
    model = {
        "layers": 8,
        "embed": 1024,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 256,
        "mlp": 3072,
        "vocab": 32768,
        "tied": False,
        "qk_norm": True,
    }
    return [
        Run(
            f"tpuchat-164m {name}",
            "tpuchat/164m",
            name,
            seconds,
            "vorushin/vorushin.github.io@08957a16:_posts/2026-02-22-llm-pretraining-tpu-v6e-50usd.md",
            {
                "model": model,
                "sequence": 2048,
                "batch": 64,
                "micro_batch": 4,
                "remat": "none",
                "unroll": True,
                "precision": {"params": "bfloat16"},
            },
            derived=f"64 x 2048 tokens / {rate:,} tokens/s",
            note="norms, RoPE and logits in bfloat16 there",
            flags=flags.COLAB,
        )
        for name, rate in (("v6e-1", 433_606), ("v5e-1", 148_829))
        for seconds in (round(64 * 2048 / rate, 4),)
    ]
