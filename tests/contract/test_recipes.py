"""Every recipe and every method of the table, at tiny size: written, trained without compiling twice, resumed to the
last bit, exported, and loaded by the tools it was exported for.

CI runs a sample. `UPDATE_DOCS=1 pytest tests/contract/test_recipes.py` runs all and records the results in
bench/results/methods_tiny.json for docs/reference/methods.md, which test_methods_table.py writes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error
from lora_reference import our_logits, rest_as, torch_logits, torch_model

from forerun.checkpoint.reader import Reader
from forerun.cli.main import main
from forerun.config.load import load
from forerun.config.recipes import RECIPES, recipe_named, written

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "methods_tiny.json"
STEP = "jit(step)"
NEWEST = ("sft", "lora", "custom")  # what the newest jax runs too; the others on the older end of the supported range
WORDS = np.frombuffer(b"Alice was beginning to get very tired of sitting by her sister", np.uint8).astype(np.int32)


def module(name: str) -> Any:
    """`bench/recipes.py`, whose tiny jobs these are, and `bench/methods_table.py`, whose methods."""
    found = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    loaded = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(ROOT / "bench")
        found.loader.exec_module(loaded)
    return loaded


# A name, the recipe it is made from, and what is changed in it.
METHODS: dict[str, tuple[str, list[str]]] = module("methods_table").METHODS
ROWS = {**METHODS, "custom": ("custom", [])}
# Each of these shares its program with a row that CI runs (lora, distil, qat + lora, dpo + lora), or is
# pretrain with another optimizer, whose runs tests/contract/test_optimizers.py resumes.
LEFT_OUT = ("dora", "distil online", "qat", "dpo", "muon", "adafactor", "lion", "adamw8bit")
NOT_IN_CI = () if os.environ.get("UPDATE_DOCS") else LEFT_OUT
CASES = [pytest.param(name, marks=() if name in NEWEST else pytest.mark.slow) for name in ROWS if name not in NOT_IN_CI]


@dataclass(frozen=True)
class Made:
    """What a row of the table has left behind."""

    whole: Path
    resumed: Path
    exported: Path
    compiled: Counter[str]


def forerun(*words: str, cwd: Path) -> str:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        assert main(list(words)) == 0, words
    return ""


@contextmanager
def programs_counted() -> Iterator[Counter[str]]:
    """By JAX itself: how often a function of each name was compiled, or taken from the cache of compiled ones."""
    found: Counter[str] = Counter()

    def heard(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found[str(about["fun_name"])] += 1

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    made: Path = module("recipes").tiny_model(folder, forerun)
    return made


@pytest.fixture(scope="module")
def make(folder: Path, model: Path) -> Callable[[str], Made]:
    """Once for each."""
    known: dict[str, Made] = {}

    def made(name: str) -> Made:
        if name not in known:
            known[name] = gone_through(name, folder, model)
        return known[name]

    return made


def gone_through(name: str, folder: Path, model: Path) -> Made:
    recipe, changes = ROWS[name]
    short = name.replace(" + ", "-").replace(" ", "-")
    job, *words = module("recipes").tiny_words(RECIPES[recipe], folder, model, forerun)
    (folder / job).rename(folder / f"{short}.yaml")
    words = [f"{short}.yaml", *changes, *words]
    with programs_counted() as compiled:
        forerun("train", *words, cwd=folder)
    whole, resumed, exported = folder / "runs" / short, folder / "runs" / f"resumed-{short}", folder / f"out-{short}"
    without_newest(whole, resumed)
    forerun("train", *words, f"name=resumed-{short}", cwd=folder)
    if name != "custom":
        forerun("export", str(whole), "--to", str(exported), cwd=folder)
    return Made(whole, resumed, exported, compiled)


def losses(run: Path) -> dict[int, str]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"].hex() for line in lines if "loss" in line}


def without_newest(run: Path, target: Path) -> None:
    """The run as a kill before its last commit would have left it."""
    shutil.copytree(run, target)
    commits = sorted((target / "checkpoints" / "commits").iterdir())
    commits[-1].unlink()
    (target / "summary.json").unlink()


def state(run: Path) -> dict[str, Any]:
    """Every array of its newest checkpoint."""
    from orbax.checkpoint import v1 as orbax

    where = run / "checkpoints" / Reader(run / "checkpoints").log.commits()[-1].folder
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), orbax.metadata(where).metadata
    )
    leaves = jax.tree_util.tree_leaves_with_path(orbax.load(where, like))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def keep(name: str, **found: Any) -> None:
    if os.environ.get("UPDATE_DOCS"):
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {**results.get(name, {}), **found}
        ordered = {key: results[key] for key in ROWS if key in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_trained_and_resumed(name: str, make: Callable[[str], Made]) -> None:
    made = make(name)
    steps = Reader(made.whole / "checkpoints").steps()
    assert len(steps) == 2
    summary = json.loads((made.whole / "summary.json").read_text())
    assert summary["final_loss"] < summary["first_loss"]
    assert made.compiled[STEP] == 1, made.compiled
    assert json.loads((made.resumed / "summary.json").read_text())["resumed_at"] == steps[0]
    assert losses(made.resumed) == losses(made.whole)
    expected, got = state(made.whole), state(made.resumed)
    assert expected.keys() == got.keys()
    assert all(np.array_equal(expected[key], got[key]) for key in expected)
    keep(name, recompiles=made.compiled[STEP] - 1, resumed_exactly=True)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", [case for case in CASES if case.values[0] in METHODS])
def test_the_export_is_loaded_with_equal_logits(name: str, make: Callable[[str], Made], model: Path) -> None:
    made = make(name)
    ours = our_logits(made.whole, WORDS[None])[0]
    apart = float(np.abs(loaded_logits(made, model) - ours).max())
    assert ours.std() > 0.3, "flat logits would agree with anything"
    assert apart < 1e-4
    keep(name, logits_apart=float(f"{apart:.0e}"))


def loaded_logits(made: Made, model: Path) -> Any:
    """By transformers or, over a base as it rested, by PEFT."""
    import peft
    import torch
    import transformers

    lora = load(made.whole / "job.yaml").job.lora
    if lora is None:
        return torch_logits(torch_model(made.exported), WORDS)
    if (made.exported / "adapter").is_dir():  # over integers, which are exported beside it
        unpacked = transformers.CompressedTensorsConfig(dequantize=True)
        under: Any = transformers.AutoModelForCausalLM.from_pretrained(
            made.exported, dtype=torch.float32, quantization_config=unpacked
        )
        return torch_logits(peft.PeftModel.from_pretrained(under, str(made.exported / "adapter")), WORDS)
    under = rest_as(torch_model(model), lora.base, lora.block)
    return torch_logits(peft.PeftModel.from_pretrained(under, str(made.exported)), WORDS)


def test_every_row_that_ci_leaves_out_has_a_recorded_result() -> None:
    results = json.loads(RESULTS.read_text())
    assert set(results) == set(ROWS)
    for name in METHODS:
        assert (results[name]["recompiles"], results[name]["resumed_exactly"]) == (0, True)
        assert results[name]["logits_apart"] < 1e-4


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_states_what_was_measured(name: str) -> None:
    recipe = RECIPES[name]
    results = json.loads((ROOT / "bench" / "results" / "recipes.json").read_text())
    assert recipe.text == module("recipes").with_head(recipe, results[name])


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
    with raises_error("E-JOB-008"):
        written(RECIPES[name], target)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with raises_error("E-JOB-007") as caught:
        recipe_named("qlra")
    assert caught.value.fix == "did you mean 'qlora'?"
