"""Every method on a tiny checkpoint of a family: 20 steps, export, and the logits of the export in transformers.

    python bench/family_methods.py                        # all families, about a minute for each
    python bench/family_methods.py olmo3 glm4             # names of VARIANTS in tests/contract/families_reference.py
    python bench/family_methods.py olmo3 --only lora      # one method

Each method runs through the Python API: a job on the checkpoint that transformers wrote, `train` and `export`. The
result is the loss and the largest difference between the logits of the trained run and those of the loaded export. A
method that forerun rejects for a family has the code of the error instead. Writes bench/results/family_methods.json,
from which bench/families_table.py makes a column of docs/reference/families.md.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# The programs run for milliseconds: most of the time would be LLVM's optimizations.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "contract"), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402
from families_reference import FAMILY_EXAMPLES, VARIANTS, Variant, reference_of  # noqa: E402
from lora_reference import our_logits, rest_as, torch_logits, torch_model  # noqa: E402

import forerun as fr  # noqa: E402
from forerun.resolve.resolve_model import resolve_model  # noqa: E402
from forerun.track.display.make_display import make_display  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "family_methods.json"
STEPS = 20
LIMIT = 1e-3  # of the difference of logits, whose standard deviation is between 0.5 and 5
WORDS = np.frombuffer(b"Alice was beginning to get very tired of sitting by her sister", np.uint8).astype(np.int32)
BYTES = {"vocab_size": 264, "bos_token_id": 1, "eos_token_id": 256, "pad_token_id": None}
FITTING = {"vocab_size_per_layer_input": 264, "linear_value_head_dim": 16}  # if a variant has the key
GROUP = 32  # inputs that share a scale; widths of the checkpoints are multiples of it
DIALOGUES = ROOT / "examples" / "sft" / "dialogues.jsonl"
PAIRS = ROOT / "examples" / "dpo" / "pairs.jsonl"
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"optimizer": {"lr": 1e-3, "warmup": 1}},
    "lora": {"lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2, "warmup": 1}},
    "qlora": {"lora": {"rank": 4, "alpha": 8, "base": "nf4", "block": GROUP}, "optimizer": {"lr": 1e-2, "warmup": 1}},
    "qat": {"qat": {"weights": "int4", "group": GROUP}, "optimizer": {"lr": 1e-3, "warmup": 1}},
    "dpo": {"preferences": "dpo", "optimizer": {"lr": 1e-3, "warmup": 1}},
}


def byte_variant(variant: Variant) -> Variant:
    """Return the variant with a vocabulary of bytes, and with widths that quantization groups divide."""

    def wide(given: Any) -> dict[str, Any]:
        return {
            key: -(-value // GROUP) * GROUP if key.endswith(("intermediate_size", "n_inner")) else value
            for key, value in given.items()
        }

    longer = {"n_positions": 256} if "n_positions" in variant.dimensions else {}
    fitting = {key: value for key, value in FITTING.items() if key in variant.changes}
    dimensions = wide({**variant.dimensions, **BYTES, **longer})
    return replace(variant, changes=wide(variant.changes) | fitting, dimensions=dimensions)


def job_of(method: str, base: Path, folder: Path, steps: int) -> fr.Job:
    chat = {"path": str(DIALOGUES), "tokenizer": "bytes", "chat_template": "chatml", "store": str(folder / "tokens")}
    pairs = {"path": str(PAIRS), "tokenizer": "bytes"}
    return fr.Job(
        name=method,
        runs=str(folder / "runs"),
        model=str(base),
        data=pairs if method == "dpo" else chat,
        sequence=256,
        batch=4,
        steps=steps,
        device="cpu",
        devices=1,
        precision={"compute": "float32"},
        remat="none",
        sample={"tokens": 0},
        checkpoint={"every": steps},
        **METHODS[method],
    )


def loaded_logits(exported: Path, base: Path, job: fr.Job) -> Any:
    """Return the logits of an export in transformers, or in PEFT over the base as the resolved `job` stores it."""
    if job.lora is None:
        return torch_logits(torch_model(exported), WORDS)
    import peft

    under = rest_as(torch_model(base), job.lora.base, job.lora.block)
    return torch_logits(peft.PeftModel.from_pretrained(under, str(exported)), WORDS)


def result_of(method: str, base: Path, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train, export and load one method. Return its losses and the difference of logits, or the error's code."""
    began = time.perf_counter()
    try:
        job = job_of(method, base, folder, steps)
        with make_display(io.StringIO()) as display:
            run = fr.train(job, reporter=display)
        exported = folder / f"{method}-export"
        fr.export(run.folder, exported)
    except fr.UserError as error:
        return {"rejected": error.code, "reason": error.what}
    ours = our_logits(Path(run.folder), WORDS[None])[0]
    apart = float(np.abs(loaded_logits(exported, base, resolve_model(job).job) - ours).max())
    first, final = run.summary["first_loss"], run.summary["final_loss"]
    found = {
        "steps": run.summary["steps"],
        "first_loss": round(first, 4),
        "final_loss": round(final, 4),
        "logits_apart": float(f"{apart:.0e}"),
        "seconds": round(time.perf_counter() - began),
    }
    fine = found["steps"] == steps and math.isfinite(final) and final < first and apart < LIMIT and ours.std() > 0.3
    return found | ({} if fine else {"failed": True})


def checkpoint_of(name: str, folder: Path) -> Path:
    """Write the tiny checkpoint of a variant with transformers, and return its folder."""
    base = folder / name
    reference_of(byte_variant(VARIANTS[name])).save_pretrained(base)
    return base


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("families", nargs="*", metavar="VARIANT", choices=[*VARIANTS, []])
    words.add_argument("--only", action="append", default=[], choices=list(METHODS))
    given = words.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for name in given.families or FAMILY_EXAMPLES.values():
        row = results.setdefault(VARIANTS[name].row, {})
        with tempfile.TemporaryDirectory() as work:
            base = checkpoint_of(name, Path(work))
            for method in given.only or METHODS:
                row[method] = {"variant": name, **result_of(method, base, Path(work))}
                print(name, method, row[method], flush=True)
                failed += [f"{name} {method}"] if "failed" in row[method] else []
                RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
