"""`forerun generate`: continue one prompt, or every line of a file."""

from __future__ import annotations

import argparse
import sys

from forerun.errors import UserError


def run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.batch is None):
        raise UserError(
            "E-COMMAND-011",
            "forerun generate needs a prompt" if args.batch is None else "a prompt and --batch were both given",
            why="it continues one prompt, or the lines of a file",
            fix=f'forerun generate {args.source} "Once upon a time", or --batch prompts.jsonl',
        )
    if args.batch is not None:
        from forerun.cli.batch import run_batch

        return run_batch(args)
    if args.out is not None:
        raise UserError(
            "E-COMMAND-012", "--out is for --batch", why="one prompt is answered on stdout", fix="add > file instead"
        )
    from forerun.cli.options.source import opened, settings_of

    settings = settings_of(args)
    model = opened(args)
    writing = model.write([model.plain_ids(args.prompt)], settings, args.stop)
    for _, piece in writing:
        print(piece, end="", flush=True)
    print()
    answer = writing.answers[0]
    print(f"{answer.tokens} tokens, ended by {answer.finish}", file=sys.stderr)
    return 0
