"""`forerun chat`: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from forerun.cli.source import Source, opened, settings_of
from forerun.errors import UserError

RESET = "/reset"
HELP = f"Ctrl-C stops an answer, {RESET} forgets the conversation, Ctrl-D leaves"


def run(args: argparse.Namespace) -> int:
    settings_of(args)
    source = opened(args)
    source.template()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history for input())
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, Any]] = list(opening)
    while (said := _asked()) is not None:
        if said == RESET:
            messages = list(opening)
            print("(a new conversation)", file=sys.stderr)
        elif said:
            messages = _answered(source, args, [*messages, {"role": "user", "content": said}]) or messages
    return 0


def _asked() -> str | None:
    """The next line; "" for Ctrl-C, None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print(f"\n({HELP})", file=sys.stderr)
        return ""


def _answered(source: Source, args: argparse.Namespace, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its answer; empty if this message cannot be answered, which is told."""
    from forerun.generate.writing import Writing
    from forerun.hub.chat import render

    try:
        prompt = render(source.template(), messages, special=source.loaded.special)
        writing = Writing(source.engine, [source.template_ids(prompt)], settings_of(args), source.decode, args.stop)
    except UserError as error:
        print(error, file=sys.stderr)
        return []
    try:
        for _, piece in writing:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    answer = writing.answers[0]
    if answer.finish == "length":
        print(f"(cut off after {answer.tokens} tokens: --max-tokens)", file=sys.stderr)
    return [*messages, {"role": "assistant", "content": answer.text}]
