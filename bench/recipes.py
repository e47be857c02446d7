"""Figures in the header of every recipe: planned at real size by the TPU compiler, and run at tiny size.

    python bench/recipes.py                 # all: a few minutes; writes bench/results/recipes.json and the recipes
    python bench/recipes.py --only lora     # one of them
    python bench/recipes.py --check         # only compare the recipes' headers with the results

A plan uses the named size instead of the recipe's model, because the compiler needs dimensions but no weights. A tiny
run uses a model of 70k parameters, which is made here, and the examples' data. Its losses show that the recipe trains,
not which loss your model will reach.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from forerun.config.recipes import BEGIN, END, RECIPES, Recipe  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "recipes.json"
FOLDER = ROOT / "src" / "forerun" / "config" / "recipes"
SLICES = "v6e-1,v5e-8"
TINY_STEPS = 12
SIZES = {"Qwen/Qwen3-0.6B": "qwen3-0.6b", "Qwen/Qwen3-0.6B-Base": "qwen3-0.6b", "Qwen/Qwen3-8B": "qwen3-8b"}
SMALL = [
    "device=cpu", "devices=1", "sequence=256", "batch=4", "micro_batch=4", f"steps={TINY_STEPS}",
    "precision.compute=float32", "remat=none", "optimizer.warmup=1", "validation.every=6", "validation.patience=null",
    "validation.batches=2", "checkpoint.every=6", "checkpoint.keep_best=0", "sample.tokens=0", "data.validation=0.1",
]  # fmt: skip
# Learning rates for a model that is nearly untrained.
RATES = {"lora": 1e-2, "qlora": 1e-2, "dpo": 3e-3, "custom": 3e-3}


class Run(Protocol):
    def __call__(self, *words: str, cwd: Path) -> str: ...


def forerun(*words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"forerun {' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def planned(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """Return the results of `forerun plan`, one per slice."""
    folder = folder / "planned"
    folder.mkdir(exist_ok=True)
    forerun("init", "--recipe", recipe.name, f"{recipe.name}.yaml", cwd=folder)
    size = [f"model={SIZES[recipe.model]}"] if recipe.model in SIZES else []
    teacher = ["distil.teacher=qwen3-1.7b"] if recipe.name == "distil" else []
    told = forerun("plan", f"{recipe.name}.yaml", *size, *teacher, "--on", SLICES, "--json", cwd=folder)
    return [_verdict(one) for one in json.loads(told)["slices"]]


def _verdict(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "slice": one["slice"],
        "fits": one["fits"],
        "peak_gib": round(one["hbm_peak_bytes"] / 2**30, 2),
        "limit_gib": round(one["hbm_limit_bytes"] / 2**30, 2),
        "step_seconds": float(f"{one['step_seconds']['mid']:.3g}"),
        "hours": round(one["hours"], 2),
        "usd": round(one["cost_usd"]["on_demand"], 2),
        "spot_usd": round(one["cost_usd"]["spot"], 2) if one["cost_usd"]["spot"] else None,
    }


def tiny_model(folder: Path, run: Run = forerun) -> Path:
    """Train a Qwen3-like byte model for 30 steps, and return its Hugging Face folder."""
    job = "model: {layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 96, qk_norm: true}\ndata: novel.txt\nsteps: 30\n"
    (folder / "tiny.yaml").write_text(job)
    (folder / "novel.txt").write_text(novel(60_000))
    small = [word for word in SMALL if not word.startswith(("steps", "validation", "data.validation", "remat"))]
    run("train", "tiny.yaml", *small, "optimizer.lr=1e-2", cwd=folder)
    run("export", "runs/tiny", "--to", "tiny-model", cwd=folder)
    return folder / "tiny-model"


def novel(characters: int) -> str:
    return sorted((ROOT / "examples/quickstart/text").glob("*.txt"))[0].read_text()[:characters]


def tiny_data(recipe: Recipe, folder: Path) -> str:
    """Write the recipe's data at tiny size, and return its name, which is the one in the recipe."""
    conversations = (ROOT / "examples/sft/dialogues.jsonl").read_text().splitlines()[:200]
    if recipe.data == "texts":
        (folder / "texts").mkdir(exist_ok=True)
        for number, start in enumerate(range(0, 60_000, 3_000)):
            (folder / "texts" / f"{number:02}.txt").write_text(novel(60_000)[start : start + 3_000])
    elif recipe.data == "data.jsonl":
        (folder / "data.jsonl").write_text("\n".join(conversations) + "\n")
    else:
        (folder / recipe.data).write_text((ROOT / "examples/dpo/pairs.jsonl").read_text())
    return recipe.data


def tiny_words(recipe: Recipe, folder: Path, model: Path, run: Run = forerun) -> list[str]:
    """Write the recipe's job, and return the arguments of `forerun train` that run it at tiny size."""
    job = f"tiny-{recipe.name}.yaml"
    run("init", "--recipe", recipe.name, job, "--data", tiny_data(recipe, folder), cwd=folder)
    words = [job, *SMALL, f"optimizer.lr={RATES.get(recipe.name, 1e-3)}"]
    if recipe.name == "custom":
        words += ["model.options={embed: 32, layers: 2, mlp: 96, reach: 4}"]
    else:
        words += [f"model=./{model.name}"]
    if recipe.data == "data.jsonl":
        words += ["data.chat_template=chatml"]
    if recipe.name == "qlora":
        words += ["lora.block=32"]
    if recipe.name == "distil":
        words += [f"distil.teacher=./{model.name}"]
        run("cache", *words, cwd=folder)
    return words


def ran(recipe: Recipe, folder: Path, model: Path, run: Run = forerun) -> dict[str, Any]:
    """Run the recipe at tiny size, and return its first and final loss and its steps."""
    run("train", *tiny_words(recipe, folder, model, run), cwd=folder)
    summary = json.loads((folder / "runs" / f"tiny-{recipe.name}" / "summary.json").read_text())
    return {name: round(summary[name], 4) for name in ("first_loss", "final_loss")} | {"steps": TINY_STEPS}


def head(result: dict[str, Any]) -> str:
    """Return the lines of a recipe's header that have figures."""
    lines = [f"# Planned for {result['size']} by the TPU compiler, list prices (python bench/recipes.py):\n"]
    lines += [f"#   {_said(one)}\n" for one in result["planned"]]
    tiny = result["tiny"]
    lines += [
        f"# Expected loss: {tiny['first_loss']:.2f} to {tiny['final_loss']:.2f} in {tiny['steps']} steps, "
        "for the model of 70k parameters that CI trains.\n",
        "# The loss of your model on your data is another one: see `validation`.\n",
    ]
    return "".join(lines)


def _said(one: dict[str, Any]) -> str:
    spot = f", ${one['spot_usd']:.2f} on spot" if one["spot_usd"] else ""
    return (
        f"{one['slice']}: {one['peak_gib']:.1f} of {one['limit_gib']:.1f} GiB a chip, "
        f"{one['step_seconds']:.3g} s a step, {one['hours']:.2f} h, ${one['usd']:.2f} on demand{spot}"
    )


def with_head(recipe: Recipe, result: dict[str, Any]) -> str:
    before, _, rest = recipe.text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{head(result)}{END}{after}"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", action="append", default=[], choices=list(RECIPES))
    words.add_argument("--check", action="store_true")
    given = words.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = [RECIPES[name] for name in given.only or RECIPES]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        model = folder if given.check else tiny_model(folder)
        for recipe in chosen:
            if not given.check:
                size = SIZES.get(recipe.model, "the model beside it")
                results[recipe.name] = {
                    "size": size,
                    "planned": planned(recipe, folder),
                    "tiny": ran(recipe, folder, model),
                }
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                (ROOT / "src/forerun/config/recipes" / f"{recipe.name}.yaml").write_text(
                    with_head(recipe, results[recipe.name])
                )
                print(recipe.name, head(results[recipe.name]), sep="\n", flush=True)
            elif with_head(recipe, results[recipe.name]) != recipe.text:
                sys.exit(f"{recipe.name}: its header differs from {RESULTS.name}; run this without --check")


if __name__ == "__main__":
    main()
