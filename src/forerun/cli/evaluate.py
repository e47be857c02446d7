"""`forerun eval`: measure a model on held-out text and on tasks of lm-eval."""

from __future__ import annotations

import glob
import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from forerun.cli.arguments import options_of
from forerun.cli.model_options import LOAD_MODEL, take_options
from forerun.errors import UserError
from forerun.reporter import SILENT, Reporter
from forerun.safe_text import redact
from forerun.verbs.option_types import Value, comma_list

TASKS = "forerun.verbs.language_model.language_model:LanguageModel.evaluate_tasks"


@options_of(LOAD_MODEL, TASKS, omit=("self", "mesh"))
def evaluate(
    source: str,
    *,
    data: Annotated[str, Value("PATH")] | None = None,
    tasks: Annotated[Sequence[str], Value("TASKS", comma_list)] = (),
    json: bool = False,
    reporter: Reporter = SILENT,
    **options: Any,
) -> int:
    """Measure a model on held-out text, on tasks, or on both.

    Args:
      data: file or folder with held-out text, for loss, perplexity and bits per byte
      json: print the results as JSON
      reporter: shows the progress
    """
    from forerun.verbs.language_model.language_model import load_model

    load_options = take_options(load_model, options)
    _require_possible(source, data, tasks, options)
    model = load_model(source, **load_options)
    answer: dict[str, Any] = {"source": model.name, "step": model.step, "dtype": model.dtype}
    step = "" if model.step is None else f", step {model.step}"
    print(model.description.replace(model.name, f"{model.name}{step}", 1), file=sys.stderr, flush=True)
    if data:
        sizes = {name: options[name] for name in ("context", "rows") if name in options}
        evaluation = model.evaluate(data, reporter=reporter, **sizes)
        answer["data"] = {"path": redact(data), **asdict(evaluation)}
        if not json:
            print(f"{redact(data)}: {evaluation}")
    if tasks:
        options["context"] = options.get("context") or model.longest_context
        results = model.evaluate_tasks(tasks, reporter=reporter, **options)
        answer["tasks"] = results.values | {"context": options["context"]}
        if not json:
            print(results.table)
    if json:
        print(json_format.dumps(answer, indent=2, default=str))
    return 0


def _require_possible(source: str, data: str | None, tasks: Sequence[str], options: dict[str, Any]) -> None:
    """Raise if the options contradict each other or name missing files, before the weights are read."""
    if not data and not tasks:
        raise UserError(
            "E-COMMAND-009",
            "forerun eval needs --data or --tasks",
            why="neither held-out text nor a task was named",
            fix=f"forerun eval {source} --data held_out.txt, or --tasks hellaswag, or both",
        )
    for_tasks = [name for name in ("limit", "chat") if name in options]
    if for_tasks and not tasks:
        raise UserError(
            "E-COMMAND-010",
            f"--{for_tasks[0]} is for --tasks",
            why="no task was named",
            fix=f"leave --{for_tasks[0]} out",
        )
    if data:
        from forerun.config.schema import Part
        from forerun.data.source.sources import open_source
        from forerun.data.text import local_path
        from forerun.storage.address import Address

        if not Address.of(data).is_remote and not glob.has_magic(data):
            local_path(data, key="--data")
        open_source(Part(path=data))
    if tasks:
        from forerun.evaluate.tasks import require_lm_eval

        require_lm_eval()
