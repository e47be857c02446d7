"""`forerun generate`: continue one prompt, or every line of a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from forerun.cli.arguments import options_of
from forerun.cli.models import GENERATE, LOAD_MODEL, load_model_and_settings
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.progress import ProgressBar
from forerun.safe_text import printable
from forerun.units import GIB
from forerun.verbs.option_types import Count, File, Value

if TYPE_CHECKING:
    from forerun.verbs.language_model import LanguageModel


@options_of(LOAD_MODEL, GENERATE, omit=("self",))
def generate(
    source: str,
    prompt: Annotated[str, Value("PROMPT", is_positional=True)] | None = None,
    *,
    batch: File | None = None,
    out: File | None = None,
    rows: Count = 8,
    **options: Any,
) -> int:
    """Continue one prompt, or every line of a file.

    Args:
      batch: JSONL file with {"prompt": ...} or {"messages": [...]} lines
      out: with `batch`: file for the answers; an existing file is continued
      rows: with `batch`: prompts that are answered together
    """
    if (prompt is None) == (batch is None):
        raise UserError(
            "E-COMMAND-011",
            "forerun generate needs a prompt" if batch is None else "a prompt and --batch were both given",
            why="it continues one prompt, or the lines of a file",
            fix=f'forerun generate {source} "Once upon a time", or --batch prompts.jsonl',
        )
    if batch is not None:
        answer_file(source, batch, out, rows, options)
        return 0
    if out is not None:
        raise UserError(
            "E-COMMAND-012", "--out is for --batch", why="one prompt is answered on stdout", fix="add > file instead"
        )
    assert prompt is not None
    stop = options.pop("stop", ())
    model, settings = load_model_and_settings(source, options)
    writing = model.write([model.plain_ids(prompt)], settings, stop)
    for _, piece in writing:
        print(piece, end="", flush=True)
    print()
    answer = writing.answers[0]
    print(f"{answer.tokens} tokens, ended by {answer.finish}", file=sys.stderr)
    return 0


# ---- Files with prompts ----


MAX_BATCH_BYTES = GIB


def answer_file(
    source: str,
    batch: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    rows: int,
    options: dict[str, Any],
) -> None:
    """Answer the lines of a file, `rows` at a time. `options` are those of the model and of the generation."""
    questions, out = read_questions(Path(batch)), None if out is None else Path(out)
    done = resumed(out, questions) if out else 0
    if done == len(questions):
        print(f"{out} has all {done} answers already", file=sys.stderr)
        return
    stop = options.pop("stop", ())
    model, settings = load_model_and_settings(source, options)
    ids = prompts_of(model, questions)
    for number, prompt in enumerate(ids, start=1):
        model.engine.check(prompt, f"{batch}, line {number}")

    if done:
        print(f"{done} of {len(questions)} were answered before", file=sys.stderr)
    tokens, began = 0, time.monotonic()
    is_drawable = out is not None or not sys.stdout.isatty()  # answers on the terminal would mix with a bar
    bar = ProgressBar("answers", len(questions), done, stream=sys.stderr, every_seconds=0, live=is_drawable)
    with written(out) as file, bar as progress:
        for first in range(done, len(ids), rows):
            some = ids[first : first + rows]
            turns = [model.turn_stop if "messages" in one else () for one in questions[first : first + rows]]
            writing = model.write(some, settings, stop, row_stops=turns, first_row=first)
            for _ in writing:
                pass
            for question, answer in zip(questions[first:], writing.answers, strict=False):
                line = question | {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
                content = json.dumps(line, ensure_ascii=file is sys.stdout)
                file.write(printable(content) + "\n")
            file.flush()
            tokens += sum(answer.tokens for answer in writing.answers)
            speed = tokens / max(time.monotonic() - began, 1e-9)
            progress.update(first + len(some), f"{speed:.0f} tokens/s")


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Return the `{"prompt": ...}` or `{"messages": [...]}` object of every line."""
    try:
        lines = read_regular(path, MAX_BATCH_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "E-COMMAND-001", f"--batch {path} cannot be read", why=str(error), fix="name a JSONL file in UTF-8"
        ) from error
    questions = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not questions:
        raise UserError(
            "E-COMMAND-002",
            f"--batch {path} is empty",
            why="it has no line",
            fix='write lines such as {"prompt": "..."}',
        )
    return questions


def _question(line: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise _unfit(where, f"it is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
        raise _unfit(where, "it is not an object with either a prompt or messages")
    if "prompt" in content:
        if not isinstance(content["prompt"], str):
            raise _unfit(where, "its prompt is not text")
        return {"prompt": content["prompt"]}
    messages = content["messages"]
    sound = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not sound or not all({"role", "content"} <= set(message) for message in messages):
        raise _unfit(where, "its messages are not a list of objects with role and content")
    return {"messages": messages}


def _unfit(where: str, why: str) -> UserError:
    fix = '{"prompt": "Once"} or {"messages": [{"role": "user", "content": "Hello"}]}'
    return UserError("E-COMMAND-003", f"{where} is no question", why=why, fix=fix)


def prompts_of(model: LanguageModel, questions: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of the prompts. All messages go through the chat template together, in one child process."""
    conversations = [question["messages"] for question in questions if "messages" in question]
    rendered = iter(model.chat_ids(conversations) if conversations else ())
    return [model.plain_ids(one["prompt"]) if "prompt" in one else next(rendered) for one in questions]


def resumed(out: Path, questions: Sequence[dict[str, Any]]) -> int:
    """Return the number of answers that `out` has already. Remove an incomplete last line."""
    if not out.is_file():  # a pipe or a device holds no earlier answers
        return 0
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            answered = json.loads(line)
            question = questions[number - 1]
            same = all(answered[key] == value for key, value in question.items()) and "text" in answered
        except (json.JSONDecodeError, KeyError, TypeError, IndexError):
            same = False
        if not same:
            raise UserError(
                "E-COMMAND-004",
                f"{out}, line {number} does not answer line {number} of the questions",
                why="an earlier run would be continued, but it had other questions",
                fix=f"name another file with --out, or remove {out}",
            )
    if len(whole) < len(content):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


@contextlib.contextmanager
def written(out: Path | None) -> Iterator[IO[str]]:
    if out is None:
        yield sys.stdout
        return
    try:
        file = out.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            "E-COMMAND-005", f"--out {out} cannot be written", why=str(error), fix="name another file"
        ) from error
    try:
        with file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(out)  # a failed write has no file name
        raise
