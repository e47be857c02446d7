"""`forerun init`: write a first job file, after at most three questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from forerun.cli.arguments import options_of
from forerun.config.recipes import RECIPES, Recipe, recipe_named
from forerun.errors import UserError
from forerun.verbs.job_files import create_job
from forerun.verbs.option_types import Name, Value


@options_of("forerun.verbs.job_files:create_job", omit=("path",))
def init(
    file: Annotated[str, Value("FILE", is_positional=True)] = "job.yaml",
    *,
    recipe: Name | None = None,
    **options: Any,
) -> int:
    """Write a first job file, after at most three questions.

    Args:
      file: job file to write
    """
    target, model, data = Path(file), options.get("model"), options.get("data")
    if recipe is None:
        recipe, model, data = _answers(model, data)
    note = _about_size(model) if model else None
    files = create_job(target, recipe_named(recipe).name, model=model, data=data)
    print(f"wrote {' and '.join(map(str, files))}")
    if note:
        print(f"warning: {note}", file=sys.stderr)
    print(f"next: forerun check {target}, then forerun plan {target}; the first lines of the file explain the rest")
    return 0


def _answers(model: str | None, data: str | None) -> tuple[str, str, str]:
    """Ask for the recipe, and for the model and the data if no option names them."""
    if not sys.stdin.isatty():
        raise UserError(
            "E-COMMAND-014",
            "forerun init cannot ask questions here",
            why="the input is not a terminal, and no --recipe is given",
            fix=f"forerun init --recipe sft job.yaml; recipes: {', '.join(RECIPES)}",
        )
    print("Which recipe?")
    for number, one in enumerate(RECIPES.values(), 1):
        print(f"  {number}  {one.name:<9} {one.summary}")
    recipe = _chosen(_answer("recipe", "sft"))
    model = model or _answer("model: a name on the hub (owner/name) or a folder", recipe.model)
    return recipe.name, model, data or _answer("data: a file or a folder", recipe.data)


def _about_size(model: str) -> str | None:
    """Return a warning if `model` is a named size, which has random weights; reject a name that means nothing."""
    from forerun.config.schema import Model
    from forerun.hub.names import kind_of
    from forerun.models.sizes import HUB_NAMES, decoder_config

    if kind_of(model) != "size":
        return None
    decoder_config(Model(name=model))
    return f"{model} is a size with random weights: the job trains from scratch; pretrained: --model {HUB_NAMES[model]}"


def _answer(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ").strip() or default


def _chosen(answer: str) -> Recipe:
    if answer.isdecimal() and 1 <= int(answer) <= len(RECIPES):
        return list(RECIPES.values())[int(answer) - 1]
    return recipe_named(answer)
