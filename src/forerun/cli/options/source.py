"""Options of `generate`, `chat` and `eval` as arguments of the API."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.generate.engine import Settings
    from forerun.verbs.language_model.language_model import LanguageModel


def opened(args: argparse.Namespace) -> LanguageModel:
    """Load the model that the command names, after a check of all options."""
    mesh = _mesh(args.mesh)
    settings_of(args)
    from forerun.verbs.language_model.language_model import load_model

    model = load_model(
        args.source,
        revision=args.revision,
        device=args.device,
        devices=args.devices,
        mesh=mesh,
        dtype=args.dtype,
        code=args.code,
    )
    print(model.description, file=sys.stderr, flush=True)
    return model


def settings_of(args: argparse.Namespace) -> Settings:
    from forerun.generate.engine import Settings
    from forerun.generate.sampling import Sampling

    return Settings(args.max_tokens, Sampling(args.temperature, args.top_k, args.top_p), args.seed)


def _mesh(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(
            "E-COMMAND-022",
            f"--mesh {text} is not a mesh",
            why="it is data x fsdp x tp, three numbers",
            fix="such as --mesh 1x4x2",
        )
    data, fsdp, tp = map(int, sizes)
    return data, fsdp, tp
