"""Example jobs that `forerun init` writes, one per training method. `bench/recipes.py` measures their figures."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from forerun.errors import UserError, did_you_mean
from forerun.files import write_output

BEGIN, END = "# figures\n", "# end of figures\n"


@dataclass(frozen=True)
class Recipe:
    """An example job.

    Args:
      summary: the line about it in `forerun init`.
      model: the default of `--model`.
      data: the default of `--data`.
      beside: files that are written next to the job, as (name in this package, name next to the job).
    """

    name: str
    summary: str
    model: str = "Qwen/Qwen3-0.6B"
    data: str = "data.jsonl"
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return packaged(f"{self.name}.yaml")


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("pretrain", "continue pre-training on texts", "Qwen/Qwen3-0.6B-Base", "texts"),
        Recipe("sft", "fine-tune on conversations, all weights"),
        Recipe("lora", "fine-tune on conversations, small adapters"),
        Recipe("qlora", "adapters for a model in four bits: large models on one chip", "Qwen/Qwen3-8B"),
        Recipe("distil", "a small model learns from a large one"),
        Recipe("qat", "train with weights rounded to four bits"),
        Recipe("dpo", "learn which of two answers you prefer", data="pairs.jsonl"),
        Recipe("custom", "train a custom model", "my_model:Model", "texts", (("my_model.py.txt", "my_model.py"),)),
    )
}


def packaged(name: str) -> str:
    """Return the text of a file in this package."""
    return files(__name__).joinpath(name).read_text("utf-8")


def recipe_named(name: str) -> Recipe:
    """Return the recipe of this name. Raise UserError if there is none."""
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        raise UserError(
            "E-JOB-007",
            f"there is no recipe {name!r}",
            why=f"recipes: {', '.join(RECIPES)}",
            fix=f"did you mean '{near}'?" if near else "choose one of them, or run `forerun init`, which asks",
        )
    return RECIPES[name]


def written(recipe: Recipe, target: Path, model: str | None = None, data: str | None = None) -> list[Path]:
    """Write the job and the files that it needs. Return their paths. Raise UserError if one of them exists."""
    texts = {target: filled(recipe, target, model, data)}
    texts |= {target.with_name(name): packaged(source) for source, name in recipe.beside}
    for path in texts:
        if path.exists():
            raise UserError(
                "E-JOB-008",
                f"{path} exists already",
                why="init does not overwrite files",
                fix=f"remove it, or give another name: forerun init --recipe {recipe.name} other.yaml",
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_output(path, text, fix=f"forerun init --recipe {recipe.name} other.yaml")
    return list(texts)


def filled(recipe: Recipe, target: Path, model: str | None = None, data: str | None = None) -> str:
    """Return the text of the recipe with the names of the run, the model and the data filled in."""
    run = target.parent.absolute().name if target.stem == "job" else target.stem
    text = recipe.text.replace(BEGIN, "").replace(END, "")
    text = text.replace("runs/NAME", f"runs/{run}").replace("FILE", str(target))
    names = {"MODEL": quoted(model or recipe.model), "DATA": quoted(data or recipe.data)}
    return "".join(_named(line, names) for line in text.splitlines(keepends=True))


def _named(line: str, names: dict[str, str]) -> str:
    """Return a line with its placeholder replaced, and with its comment in the same column."""
    key, colon, rest = line.partition(": ")
    word = rest.split(maxsplit=1)[0] if rest.strip() else ""
    if not colon or word not in names:
        return line
    comment = rest.find("#")
    made = f"{key}: {names[word]}"
    return f"{made:<{line.index('#') - 1}} {rest[comment:]}" if comment >= 0 else f"{made}\n"


def quoted(value: str) -> str:
    """Return a text as a YAML scalar, in quotes if it needs them."""
    plain = value.replace("/", "").replace(".", "").replace("-", "").replace("_", "")
    return value if plain.isalnum() and not plain.isdecimal() else "'" + value.replace("'", "''") + "'"
