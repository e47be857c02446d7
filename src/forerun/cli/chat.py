"""`forerun chat`: talk with a model in the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.cli.model_options import GENERATE, LOAD_MODEL, load_model_and_settings
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.verbs.option_types import Count, Value

if TYPE_CHECKING:
    from forerun.generate.engine import Settings
    from forerun.verbs.language_model.language_model import LanguageModel

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
