"""`forerun eval`: measure a model on held-out text and on tasks of lm-eval."""

from __future__ import annotations

import argparse
import glob
import json
import sys
from dataclasses import asdict
from typing import Any

from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.safe_text import redact
from forerun.units import Count


def run(args: argparse.Namespace) -> int:
    if not args.data and not args.tasks:
        raise UserError(
            "E-COMMAND-009",
            "forerun eval needs --data or --tasks",
            why="neither held-out text nor a task was named",
            fix=f"forerun eval {args.source} --data held_out.txt, or --tasks hellaswag, or both",
        )
    _require_possible(args)
    from forerun.verbs.language_model.language_model import load_model

    model = load_model(
        args.source,
        revision=args.revision,
        device=args.device,
        devices=args.devices,
        dtype=args.dtype,
        code=args.code,
    )
    answer: dict[str, Any] = {"source": model.name, "step": model.step, "dtype": model.dtype}
    step = "" if model.step is None else f", step {model.step}"
    print(model.description.replace(model.name, f"{model.name}{step}", 1), file=sys.stderr, flush=True)
    if args.data:
        found = model.evaluate(args.data, context=args.context, rows=args.batch, reporter=LineReporter(sys.stderr))
        answer["data"] = {"path": redact(args.data), **asdict(found)}
        if not args.json:
            print(
                f"{redact(args.data)}: loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.4g}, "
                f"{found.bits_per_byte:.4f} bits per byte ({Count(found.tokens)} tokens, contexts of {found.context})"
            )
    if args.tasks:
        context = args.context or model.longest_context
        results = model.evaluate_tasks(
            args.tasks,
            context=context,
            rows=args.batch,
            limit=args.limit,
            chat=args.chat,
            reporter=LineReporter(sys.stderr),
        )
        answer["tasks"] = results.values | {"context": context}
        if not args.json:
            print(results.table)
    if args.json:
        print(json.dumps(answer, indent=2, default=str))
    return 0


def _require_possible(args: argparse.Namespace) -> None:
    """Raise if the options contradict each other or name missing files, before the weights are read."""
    for_tasks = [word for word, given in (("--limit", args.limit is not None), ("--chat", args.chat)) if given]
    if for_tasks and not args.tasks:
        raise UserError(
            "E-COMMAND-010", f"{for_tasks[0]} is for --tasks", why="no task was named", fix=f"leave {for_tasks[0]} out"
        )
    if args.data:
        from forerun.config.schema import Part
        from forerun.data.source.sources import open_source
        from forerun.data.text import local_path
        from forerun.storage.address import Address

        if not Address.of(args.data).is_remote and not glob.has_magic(args.data):
            local_path(args.data, key="--data")
        open_source(Part(path=args.data))
    if args.tasks:
        from forerun.evaluate.tasks import require_lm_eval

        require_lm_eval()
