"""`forerun eval`: how good a model is, on held-out text and on tasks of lm-eval."""

from __future__ import annotations

import argparse
import glob
import json
import sys
import time
from typing import Any

from forerun.cli.source import warn
from forerun.errors import UserError
from forerun.safe_text import redact
from forerun.units import Count, Seconds

EVERY_SECONDS = 10.0


def run(args: argparse.Namespace) -> int:
    if not args.data and not args.tasks:
        raise UserError(
            "forerun eval needs something to judge by",
            why="neither held-out text nor a task was named",
            fix=f"forerun eval {args.source} --data held_out.txt, or --tasks hellaswag, or both",
        )
    _require_possible(args)
    from forerun.loop.compilation import use_cache
    from forerun.loop.evaluate import USUAL_CONTEXT, evaluate_tasks, evaluate_text, longest_context
    from forerun.loop.loaded import load_model

    use_cache()
    longest = longest_context(args.source, args.revision)
    loaded = load_model(
        args.source,
        revision=args.revision,
        device=args.device,
        devices=args.devices,
        dtype=args.dtype,
        code=args.code,
        tell=warn,
    )
    device = loaded.mesh.devices.flat[0]
    answer: dict[str, Any] = {"source": loaded.name, "step": loaded.step, "dtype": str(loaded.compute.dtype)}
    step = "" if loaded.step is None else f", step {loaded.step}"
    print(
        f"{loaded.name}{step}: {loaded.mesh.size} x {device.device_kind}, {loaded.compute.dtype}",
        file=sys.stderr,
        flush=True,
    )
    if args.data:
        context = args.context or min(longest, USUAL_CONTEXT)
        report = evaluate_text(loaded, args.data, context=context, rows=args.batch, progress=Progress("rows"))
        found = report.result
        answer["data"] = {
            "path": redact(args.data),
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.tokens,
            "text_bytes": found.text_bytes,
            "documents": report.documents,
            "context": context,
        }
        if not args.json:
            print(
                f"{redact(args.data)}: loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.4g}, "
                f"{found.bits_per_byte:.4f} bits per byte ({Count(found.tokens)} tokens, contexts of {context})"
            )
    if args.tasks:
        results = evaluate_tasks(
            loaded,
            args.tasks,
            context=args.context or longest,
            rows=args.batch,
            limit=args.limit,
            chat=args.chat,
            progress=Progress("requests"),
        )
        answer["tasks"] = results.values | {"context": args.context or longest}
        if not args.json:
            print(results.table)
    if args.json:
        print(json.dumps(answer, indent=2, default=str))
    return 0


def _require_possible(args: argparse.Namespace) -> None:
    """What can be wrong without a look at the model, found before its weights are read."""
    for_tasks = [word for word, given in (("--limit", args.limit is not None), ("--chat", args.chat)) if given]
    if for_tasks and not args.tasks:
        raise UserError(f"{for_tasks[0]} is for --tasks", why="no task was named", fix=f"leave {for_tasks[0]} out")
    if args.data:
        from forerun.config.schema import Part
        from forerun.data.source.sources import open_source
        from forerun.data.text import local_path

        if "://" not in args.data and not glob.has_magic(args.data):
            local_path(args.data, key="--data")
        open_source(Part(path=args.data))
    if args.tasks:
        from forerun.evaluate.tasks import require_harness

        require_harness()


class Progress:
    """How many of how many, and how long still, on stderr: one line on a terminal, elsewhere one every 10 seconds."""

    def __init__(self, noun: str) -> None:
        self._noun, self._began, self._shown = noun, 0.0, 0.0

    def __call__(self, done: int, total: int) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if done == 0:  # lm-eval asks in several turns
            self._began = self._shown = now
            return
        if not terminal and done < total and now - self._shown < EVERY_SECONDS:
            return
        self._shown = now
        spent = now - self._began
        told = f"{done}/{total} {self._noun}, "
        told += f"eta {Seconds(spent / done * (total - done))}" if done < total else f"{Seconds(spent)}"
        end = "\n" if not terminal or done == total else ""
        print(f"\r\x1b[K{told}" if terminal else told, end=end, file=sys.stderr, flush=True)
