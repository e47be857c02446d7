"""`forerun generate --batch`: every line of a JSONL file, in its order, and on from where an earlier run stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from forerun.cli.source import Source, opened, settings_of
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.safe_text import printable
from forerun.units import GIB, Seconds

MAX_BATCH_BYTES = GIB


def run_batch(args: argparse.Namespace) -> int:
    questions = read_questions(Path(args.batch))
    out = Path(args.out) if args.out is not None else None
    done = resumed(out, questions) if out else 0
    if done == len(questions):
        print(f"{out} has all {done} answers already", file=sys.stderr)
        return 0
    settings = settings_of(args)
    source = opened(args)
    ids = prompts_of(source, questions)
    for number, prompt in enumerate(ids, start=1):
        source.engine.check(prompt, f"{args.batch}, line {number}")

    from forerun.generate.writing import Writing

    progress = Progress(done, len(questions))
    with written(out) as file:
        for first in range(done, len(ids), args.rows):
            some = ids[first : first + args.rows]
            turns = [source.turn_stop if "messages" in one else () for one in questions[first : first + args.rows]]
            writing = Writing(source.engine, some, settings, source.decode, args.stop, row_stops=turns, first_row=first)
            for _ in writing:
                pass
            for question, answer in zip(questions[first:], writing.answers, strict=False):
                line = question | {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
                content = json.dumps(line, ensure_ascii=file is sys.stdout)
                file.write(printable(content) + "\n")
            file.flush()
            progress.say(len(some), sum(answer.tokens for answer in writing.answers))
    return 0


def read_questions(path: Path) -> list[dict[str, Any]]:
    """`{"prompt": ...}` or `{"messages": [...]}` of every line."""
    try:
        lines = read_regular(path, MAX_BATCH_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--batch {path} cannot be read", why=str(error), fix="name a JSONL file in UTF-8") from error
    questions = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not questions:
        raise UserError(f"--batch {path} is empty", why="it has no line", fix='write lines such as {"prompt": "..."}')
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
    return UserError(f"{where} is no question", why=why, fix=fix)


def prompts_of(source: Source, questions: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of the prompts. All messages go through the chat template together, in one child process."""
    conversations = [question["messages"] for question in questions if "messages" in question]
    rendered = iter(source.chat_ids(conversations) if conversations else ())
    return [source.plain_ids(one["prompt"]) if "prompt" in one else next(rendered) for one in questions]


def resumed(out: Path, questions: Sequence[dict[str, Any]]) -> int:
    """How many answers `out` holds already. A last line that was cut off is taken away."""
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
        raise UserError(f"--out {out} cannot be written", why=str(error), fix="name another file") from error
    try:
        with file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(out)  # a failed write has no file name
        raise


class Progress:
    """One line on stderr per group of rows: how many, how fast, how long still. On a terminal it is the same line."""

    def __init__(self, done: int, total: int) -> None:
        self._begun_at = self._done = done
        self._total, self._tokens, self._began = total, 0, time.monotonic()
        if done:
            print(f"{done} of {total} were answered before", file=sys.stderr)

    def say(self, answers: int, tokens: int) -> None:
        self._done, self._tokens = self._done + answers, self._tokens + tokens
        spent = max(time.monotonic() - self._began, 1e-9)
        left = Seconds(spent / (self._done - self._begun_at) * (self._total - self._done))
        told = f"{self._done}/{self._total} answers, {self._tokens / spent:.0f} tokens/s"
        told += f", {left} to go" if self._done < self._total else f", {Seconds(spent)} in all"
        terminal = sys.stderr.isatty()
        end = "\n" if not terminal or self._done == self._total else ""
        print(f"\r\x1b[K{told}" if terminal else told, end=end, file=sys.stderr, flush=True)
