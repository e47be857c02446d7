"""`forerun tokenizer`: train a tokenizer on text, or show how one splits text."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forerun.errors import UserError

OF_TRAIN = {"to": "--to", "vocab": "--vocab", "end": "--end", "special": "--special"}
OF_TRAIN |= {"chat_template": "--chat-template", "split": "--split", "normalize": "--normalize"}


def run(args: argparse.Namespace) -> int:
    """Train a tokenizer, or print the report of an existing one."""
    return _train(args) if args.action == "train" else _show(args)


def _train(args: argparse.Namespace) -> int:
    from forerun.verbs.tokenizer.tokenizer import train_tokenizer

    if args.to is None:
        raise UserError(
            "E-COMMAND-031",
            "--to is missing",
            why="forerun tokenizer train writes a folder",
            fix="name it, for example --to tokenizer/",
        )
    given = {"vocab": args.vocab, "end": args.end, "chat_template": args.chat_template, "splitting": args.split}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.normalize is not None:
        settings["normalize"] = args.normalize
    if args.chat_template == "none":
        settings["chat_template"] = None
    trained = train_tokenizer(args.texts, args.to, special=args.special, compare=args.compare, **settings)
    for text in trained.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print("\n".join(trained.report.lines()))
    print(f"done: {trained.folder}  {trained.vocabulary:,} tokens  {trained.sha256[:16]}")
    print(f"      job: data.tokenizer={trained.folder}; transformers: AutoTokenizer.from_pretrained({args.to!r})")
    return 0


def _show(args: argparse.Namespace) -> int:
    from forerun.verbs.tokenizer.tokenizer import inspect_tokenizer

    name, *texts = args.texts
    if not texts:
        raise UserError(
            "E-COMMAND-032",
            "forerun tokenizer show needs a tokenizer and text",
            why=f"only {name} is given",
            fix=f"add files with text, for example: forerun tokenizer show {name} texts.txt",
        )
    if foreign := [option for key, option in OF_TRAIN.items() if getattr(args, key)]:
        raise UserError(
            "E-COMMAND-033",
            f"{foreign[0]} is an option of forerun tokenizer train",
            why="show reads an existing tokenizer and writes nothing",
            fix=f"remove {foreign[0]}, or write train instead of show",
        )
    print("\n".join(inspect_tokenizer(name, texts, compare=args.compare).lines()))
    return 0
