"""`forerun init`, `convert`, `schema` and `explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from forerun.cli.arguments import options_of
from forerun.config.recipes import RECIPES, Recipe, recipe_named
from forerun.errors import UserError
from forerun.verbs.job_files import convert as convert_file
from forerun.verbs.job_files import create_job
from forerun.verbs.option_types import File, Name, Value


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


@options_of("forerun.verbs.job_files:convert", omit=("path",))
def convert(file: Annotated[str, Value("FILE")], **options: Any) -> int:
    """Print the job on stdout, and what the user must know on stderr.

    Args:
      file: YAML file of axolotl or TRL, or TrainingArguments as JSON
    """
    converted = convert_file(file, **options)
    sys.stdout.write(converted.text)
    for assumption in converted.assumed:
        print(f"assumed: {assumption}", file=sys.stderr)
    for key, reason in converted.not_converted.items():
        print(f"not converted: {key}: {reason}", file=sys.stderr)
    print(
        f"converted from {converted.source}; {len(converted.not_converted)} keys not converted, "
        f"{len(converted.unneeded)} not needed (listed at the end of the job)",
        file=sys.stderr,
    )
    return 0


def explain(code: Annotated[str, Value("CODE", is_positional=True)] | None = None) -> int:
    """Print the texts of a code, or all codes with the first line of each error. Needs no network.

    Args:
      code: error code such as E-DATA-017 (default: list all codes)
    """
    from forerun.error_catalog import codes, what_of
    from forerun.verbs.machine import explain as explain_code

    if code is not None:
        print(explain_code(code))
        return 0
    for name in codes():
        # Flush, because reading all files takes about 2 s.
        print(f"{name:<18}{what_of(name).splitlines()[0]}", flush=True)
    return 0


def schema(*, output: File | None = None) -> int:
    """Print the JSON Schema of a job file, for editors.

    Args:
      output: write to this file instead of the terminal
    """
    from forerun.files import write_output
    from forerun.verbs.job_files import job_schema

    text = json.dumps(job_schema(), indent=2)
    if output is None:
        print(text)
        return 0
    write_output(Path(output), text + "\n", fix="name another file with --output")
    print(f"wrote {output}; the first line of a job file makes editors use it:")
    print(f"# yaml-language-server: $schema={output}")
    return 0
