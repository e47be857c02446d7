"""`forerun generate`: continue one prompt, or every line of a file."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from forerun.cli.arguments import options_of
from forerun.cli.model_options import GENERATE, LOAD_MODEL, load_model_and_settings
from forerun.errors import UserError
from forerun.verbs.option_types import Count, File, Value


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
        from forerun.cli.batch import answer_file

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
