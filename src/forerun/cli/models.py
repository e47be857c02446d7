"""`forerun chat` and `forerun eval`, and the options of commands with a model."""

from __future__ import annotations

import contextlib
import glob
import inspect
import json as json_format
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.reporter import SILENT, Reporter
from forerun.safe_text import redact
from forerun.verbs.option_types import Count, Value, comma_list

if TYPE_CHECKING:
    from forerun.generate.engine import Settings
    from forerun.verbs.language_model import LanguageModel

LOAD_MODEL = "forerun.verbs.language_model:load_model"
GENERATE = "forerun.verbs.language_model:LanguageModel.generate"


def take_options(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the parameters of a function from `options`, and return them."""
    return {name: options.pop(name) for name in inspect.signature(function).parameters if name in options}


def load_model_and_settings(source: str, options: dict[str, Any]) -> tuple[LanguageModel, Settings]:
    """Load a model and print its description, after a check of all options."""
    from forerun.verbs.language_model import generation_settings, load_model

    load_options = take_options(load_model, options)
    settings = generation_settings(**options)
    model = load_model(source, **load_options)
    print(model.description, file=sys.stderr, flush=True)
    return model, settings


RESET, SHOW_HELP, LEAVE = "/reset", "/help", ("/exit", "/quit")
CTRL_C = "\x03"  # what the terminal would send for Ctrl-C; no line of a user has it
HELP = (
    f"Ctrl-C stops an answer, {RESET} forgets the conversation, {SHOW_HELP} shows this, "
    f"{LEAVE[0]}, Ctrl-D or Ctrl-C twice leaves"
)
COMMAND = re.compile(r"/[A-Za-z]+")


@options_of(LOAD_MODEL, GENERATE, omit=("self", "prompt"))
def chat(
    source: str,
    *,
    system: Annotated[str, Value("TEXT")] | None = None,
    max_tokens: Count = 1024,
    **options: Any,
) -> int:
    """Chat with a model until the end of the input.

    Args:
      system: the system message
    """
    stop = options.pop("stop", ())
    model, settings = load_model_and_settings(source, {**options, "max_tokens": max_tokens})
    assert model.chat_template  # raises if there is none
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history for input())
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    opening = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(opening)
    before = ""
    while (said := _asked()) is not None:
        if said == before == CTRL_C:  # the second in a row
            return INTERRUPTED
        before = said
        if said in LEAVE:
            break
        if said == RESET:
            messages = list(opening)
            print("(a new conversation)", file=sys.stderr)
        elif COMMAND.fullmatch(said):
            unknown = "" if said == SHOW_HELP else f"there is no command {said}; to send it as text, write /{said}\n"
            print(f"({unknown}{HELP})", file=sys.stderr)
        elif said and said != CTRL_C:
            said = said[1:] if COMMAND.fullmatch(said[1:]) else said
            messages = _answered(model, settings, stop, [*messages, {"role": "user", "content": said}]) or messages
    return 0


def _asked() -> str | None:
    """Return the next line, CTRL_C for Ctrl-C, or None at the end."""
    terminal = sys.stdin.isatty()
    try:
        if not terminal:  # a file or a pipe: a user who presses Ctrl-C wants the command to end
            return input().strip()
        with interrupt.raising():
            return input("> ").strip()
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        print(f"\n({HELP})", file=sys.stderr)
        interrupt.handled()
        return CTRL_C


def _answered(
    model: LanguageModel, settings: Settings, stop: Sequence[str], messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation with its answer. If the message cannot be answered, print why and return nothing."""
    try:
        writing = model.write(model.chat_ids([messages]), settings, [*stop, *model.turn_stop])
    except UserError as error:
        print(error, file=sys.stderr)
        return []
    try:
        with interrupt.cooperating() if sys.stdin.isatty() else contextlib.nullcontext():
            for _, piece in writing:
                print(piece, end="", flush=True)
                if interrupt.pressed():
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(" ...", end="")
        interrupt.handled()
    print(flush=True)
    answer = writing.answers[0]
    if answer.finish == "length":
        print(f"(cut off after {answer.tokens} tokens: --max-tokens)", file=sys.stderr)
    return [*messages, {"role": "assistant", "content": answer.text}]


TASKS = "forerun.verbs.language_model:LanguageModel.evaluate_tasks"


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
    from forerun.verbs.language_model import load_model

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
