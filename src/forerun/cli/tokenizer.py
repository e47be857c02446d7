"""`forerun tokenizer`: train a tokenizer on text, or show how one splits text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from forerun.cli.arguments import options_of
from forerun.errors import UserError
from forerun.verbs.option_types import Folder, Value


@options_of("forerun.verbs.tokenizer.tokenizer:train_tokenizer", omit=("data",))
def tokenizer(
    action: Annotated[Literal["train", "show"], Value("ACTION")],
    texts: Annotated[Sequence[str], Value("TEXTS")],
    *,
    to: Folder | None = None,
    **options: Any,
) -> int:
    """Train a tokenizer, or print the report of an existing one.

    Args:
      action: train: a new one; show: a report
      texts: files, folders or globs as in data.path, or a job file; for show, the tokenizer comes first
    """
    if action == "show":
        return _show(texts, {"to": to, **options} if to else options)
    from forerun.verbs.tokenizer.tokenizer import train_tokenizer

    if to is None:
        raise UserError(
            "E-COMMAND-031",
            "--to is missing",
            why="forerun tokenizer train writes a folder",
            fix="name it, for example --to tokenizer/",
        )
    if options.get("chat_template") == "none":
        options["chat_template"] = None
    trained = train_tokenizer(texts, to, **options)
    for text in trained.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print("\n".join(trained.report.lines()))
    print(f"done: {trained.folder}  {trained.vocabulary:,} tokens  {trained.sha256[:16]}")
    print(f"      job: data.tokenizer={trained.folder}; transformers: AutoTokenizer.from_pretrained({str(to)!r})")
    return 0


def _show(texts: Sequence[str], options: dict[str, Any]) -> int:
    from forerun.verbs.tokenizer.tokenizer import inspect_tokenizer

    name, *data = texts
    if not data:
        raise UserError(
            "E-COMMAND-032",
            "forerun tokenizer show needs a tokenizer and text",
            why=f"only {name} is given",
            fix=f"add files with text, for example: forerun tokenizer show {name} texts.txt",
        )
    if of_train := [option for option in options if option != "compare"]:
        flag = "--split" if of_train[0] == "splitting" else f"--{of_train[0].replace('_', '-')}"
        raise UserError(
            "E-COMMAND-033",
            f"{flag} is an option of forerun tokenizer train",
            why="show reads an existing tokenizer and writes nothing",
            fix=f"remove {flag}, or write train instead of show",
        )
    print("\n".join(inspect_tokenizer(name, data, **options).lines()))
    return 0
