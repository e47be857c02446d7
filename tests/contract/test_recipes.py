"""Every recipe, at tiny size: written, trained without compiling twice, resumed to the last bit, exported.

The loop raises when a step is compiled after the first (`loop/compilation.py: no_compilation`), so a run that ends has
not recompiled.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forerun.checkpoint.reader import Reader
from forerun.cli.main import main
from forerun.config.load import load
from forerun.config.recipes import RECIPES, recipe_named, written
from forerun.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow
NEWEST = ("sft", "lora", "custom")  # what the newest jax runs too; the others on the older end of the supported range


def bench() -> Any:
    """`bench/recipes.py`, whose tiny jobs these are."""
    found = importlib.util.spec_from_file_location("bench_recipes", ROOT / "bench" / "recipes.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def forerun(*words: str, cwd: Path) -> str:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        assert main(list(words)) == 0, words
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    made: Path = bench().tiny_model(folder, forerun)
    return made


def losses(run: Path) -> dict[int, str]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"].hex() for line in lines if "loss" in line}


def without_newest(run: Path, target: Path) -> None:
    """The run as a kill before its last commit would have left it."""
    shutil.copytree(run, target)
    commits = sorted((target / "checkpoints" / "commits").iterdir())
    commits[-1].unlink()
    (target / "summary.json").unlink()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in NEWEST else SLOW) for name in RECIPES])
def test_trained_resumed_and_exported(name: str, folder: Path, model: Path) -> None:
    words = bench().tiny_words(RECIPES[name], folder, model, forerun)
    forerun("train", *words, cwd=folder)
    whole, resumed = folder / "runs" / f"tiny-{name}", folder / "runs" / f"resumed-{name}"
    steps = Reader(whole / "checkpoints").steps()
    assert len(steps) == 2
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["final_loss"] < summary["first_loss"]

    without_newest(whole, resumed)
    forerun("train", *words, f"name=resumed-{name}", cwd=folder)
    assert json.loads((resumed / "summary.json").read_text())["resumed_at"] == steps[0]
    assert losses(resumed) == losses(whole)
    if name != "custom":
        forerun("export", f"runs/tiny-{name}", "--to", f"out-{name}", cwd=folder)


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_states_what_was_measured(name: str) -> None:
    recipe = RECIPES[name]
    results = json.loads((ROOT / "bench" / "results" / "recipes.json").read_text())
    assert recipe.text == bench().with_head(recipe, results[name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_written_job_is_read_back_as_it_was_asked_for(name: str, tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    model, data = str(tmp_path / "it's here"), str(tmp_path / "some: file")
    files = written(RECIPES[name], target, model=model, data=data)
    assert target in files
    job = load(target).job
    assert job.model.name == model
    assert job.data.path == data
    assert "MODEL" not in target.read_text()
    with pytest.raises(UserError, match="exists already"):
        written(RECIPES[name], target)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no recipe") as caught:
        recipe_named("qlra")
    assert caught.value.fix == "did you mean 'qlora'?"
