"""Random job files: one whole number makes one file, with its overrides and what is asked of `plan`.

More than half of them mean a job that can be planned somewhere. The others hold one or two of the mistakes that
people and editors make: wrong names, wrong types, sizes that do not divide, YAML that is not what it seems.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from job_mistakes import BAD_GLOBS, BAD_OVERRIDES, DATA, TEXT_MISTAKES, TREE_MISTAKES, Tree

from forerun.config.schema import RESIDUALS
from forerun.models.sizes import SIZES

DATA_TEXT = "Once there was a job that nobody had planned.\n" * 400
MISTAKEN_SHARE = 0.45
GLOBS = ("v6e-*", "v5e-?", "v5p-8,v5p-16", "v4-8", "v3-8", "tpu7x-2x2x1", "v5e-1*", "v5litepod-8", "v6e-1,v6e-8")
SMALL_SLICES = ("v6e-1", "v6e-8", "v5e-1", "v5e-8", "v4-8", "v5p-8", "v3-8", "tpu7x-2x2x1")
ZONES = (None, None, None, "us-east5-b", "europe-west4-a", "us-central2-b")
PRICES = "generation,zone,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date\n"


@dataclass(frozen=True)
class JobFile:
    """`mistakes` are the names of what was done to a file that was right before; mostly none."""

    seed: int
    text: str
    overrides: tuple[str, ...]
    on: str
    zone: str | None
    prices: str | None  # the text of a price file
    max_usd: float | None
    max_hours: float | None
    mistakes: tuple[str, ...]


def job_file(seed: int) -> JobFile:
    """The same seed gives the same file, on every machine."""
    dice = random.Random(f"job {seed}")
    tree = small_job(dice) if dice.random() < 0.1 else _job(dice)
    overrides = _overrides(dice, tree)
    on = dice.choice(GLOBS)
    prices = _prices(dice) if dice.random() < 0.2 else None
    made: list[str] = []
    text = ""
    if dice.random() < MISTAKEN_SHARE:
        for mistake in dice.sample(TREE_MISTAKES, 1 if dice.random() < 0.8 else 2):
            mistake(dice, tree)
            made.append(mistake.__name__.strip("_"))
        if dice.random() < 0.3:
            text_mistake = dice.choice(TEXT_MISTAKES)
            text = text_mistake(dice, _written(dice, tree))
            made.append(text_mistake.__name__.strip("_"))
        if dice.random() < 0.08:
            on = dice.choice(BAD_GLOBS)
            made.append("on")
        if dice.random() < 0.12:
            overrides.append(dice.choice(BAD_OVERRIDES))
            made.append("override")
    return JobFile(
        seed=seed,
        text=text if made and text else _written(dice, tree),
        overrides=tuple(overrides),
        on=on,
        zone=dice.choice(ZONES),
        prices=prices,
        max_usd=dice.choice((None, None, None, 0.01, 50.0, 1e9)),
        max_hours=dice.choice((None, None, None, 0.001, 24.0, 1e9)),
        mistakes=tuple(made),
    )


def small_file(seed: int) -> JobFile:
    """A job that is right, small enough to be compiled in seconds, for one small slice."""
    dice = random.Random(f"small job {seed}")
    text = _written(dice, small_job(dice))
    return JobFile(seed, text, (), dice.choice(SMALL_SLICES), None, None, None, None, ())


def small_job(dice: random.Random) -> Tree:
    heads = dice.choice((2, 4, 8))
    tree: Tree = {
        "model": {
            "layers": dice.choice((1, 2, 5)),
            "embed": heads * dice.choice((32, 64, 128)),
            "heads": heads,
            "kv_heads": dice.choice((1, heads // 2, heads)),
            "vocab": dice.choice((256, 512, 1000, 32_000)),
            "tied": dice.random() < 0.5,
            "qk_norm": dice.random() < 0.3,
            "qkv_bias": dice.random() < 0.3,
        },
        "data": DATA,
        "sequence": dice.choice((64, 128, 256, 512, 1000)),
        "batch": dice.choice((8, 16, 24, 64)),
        "steps": dice.choice((1, 10, 20_000)),
        "remat": _remat(dice),
    }
    if dice.random() < 0.5:
        tree["micro_batch"] = 1
    if dice.random() < 0.3:
        tree["precision"] = _precision(dice)
    if dice.random() < 0.3:
        tree["optimizer"] = _optimizer(dice)
    if dice.random() < 0.3:
        tree["model"]["window"] = dice.choice((1, 100, 128, 4096))
    return tree


def _job(dice: random.Random) -> Tree:
    batch = dice.choice((1, 2, 3, 8, 16, 24, 32, 48, 64, 100, 128, 256, 512, 1000, 1024, 4096))
    if dice.random() < 0.02:
        batch = dice.choice((65_536, 999_983, 1_000_000))
    tree: Tree = {
        "model": _model(dice),
        "data": dice.choice((DATA, {"path": DATA}, {"path": DATA, "tokenizer": "bytes"})),
    }
    parts: dict[str, Callable[[], Any]] = {
        "batch": lambda: batch,
        "sequence": lambda: dice.choice(
            (1, 7, 128, 512, 1000, 1024, 2048, 4096, 8192, 8192, 32_768, 131_072, 1_000_000)
        ),
        "micro_batch": lambda: dice.choice((1, 1, 1, 2, 3, 4, 8, batch, None)),
        "mesh": lambda: _mesh(dice),
        "remat": lambda: _remat(dice),
        "precision": lambda: _precision(dice),
        "optimizer": lambda: _optimizer(dice),
        "attention": lambda: dice.choice(("auto", "splash", "cudnn", "xla")),
        "loss_chunk": lambda: dice.choice((1, 100, 512, None)),
        "checkpoint": lambda: {"every": dice.choice((1, 100, 10**9)), "keep": dice.choice((1, 2, 1000))},
        "seed": lambda: dice.choice((0, 1, 2**31, 2**32 - 1)),
        "device": lambda: dice.choice(("auto", "tpu", "cpu", ["tpu", "cpu"])),
        "devices": lambda: dice.choice((1, 8, None)),
        "log_every": lambda: dice.choice((1, 10, 10**6)),
        "sample": lambda: {
            "prompt": dice.choice(("", "Čas ", "時")),
            "tokens": dice.choice((0, 120)),
            "temperature": 0,
        },
        "name": lambda: dice.choice(("first", "run-2", "a.b_c")),
    }
    for name, make in parts.items():
        if dice.random() < (0.8 if name in ("batch", "sequence") else 0.3):
            tree[name] = make()
    length = dice.random()
    if length < 0.85:
        tree["steps"] = dice.choice((1, 10, 1000, 100_000, 10**9))
    elif length < 0.95:
        tree["epochs"] = dice.choice((1e-9, 0.5, 1, 1.5, 3, 1e6))
    return tree


def _model(dice: random.Random) -> Any:
    named = dice.choice(list(SIZES))
    kind = dice.random()
    if kind < 0.4:
        return named
    if kind < 0.55:
        return {"name": named, **dice.choice(({"layers": 1}, {"vocab": 300}, {"window": 512}, {"tied": False}, {}))}
    heads = dice.choice((1, 2, 3, 4, 8, 12, 16, 32, 64))
    model: Tree = {
        "layers": dice.choice((1, 2, 7, 12, 24, 80, 10**7 if dice.random() < 0.1 else 30)),
        "embed": heads * dice.choice((1, 8, 32, 64, 80, 128)),
        "heads": heads,
    }
    extras: dict[str, Any] = {
        "kv_heads": dice.choice((1, heads)),
        "head_dim": dice.choice((1, 7, 64, 256)),
        "mlp": dice.choice((1, 100, 1024, 30_000)),
        "vocab": dice.choice((1, 300, 512, 32_000, 151_936, 10**6)),
        "tied": dice.random() < 0.5,
        "qkv_bias": True,
        "qk_norm": True,
        "window": dice.choice((1, 100, 4096)),
        "rope_theta": dice.choice((10_000, 5e5)),
        "rope_scaling": {"factor": 8.0},
        "norm_eps": 1e-5,
    }
    return model | {name: value for name, value in extras.items() if dice.random() < 0.35}


def _mesh(dice: random.Random) -> Tree:
    return dice.choice(
        (
            {"fsdp": -1},
            {"data": -1, "fsdp": 1},
            {"tp": -1, "fsdp": 1},
            {"tp": dice.choice((2, 4, 8))},
            {"data": 2},
            {"data": 1, "fsdp": 8, "tp": 1},
            {"data": 2, "fsdp": 4, "tp": dice.choice((1, 2))},
        )
    )


def _remat(dice: random.Random) -> Any:
    if dice.random() < 0.6:
        return dice.choice(("none", "full", "dots", {"policy": "full"}))
    names = dice.sample(RESIDUALS, dice.randrange(4))
    cut = dice.randrange(len(names) + 1)
    return {"policy": "named", "keep": names[:cut], "offload": names[cut:]}


def _precision(dice: random.Random) -> Tree:
    both = ("bfloat16", "float32")
    return {"params": dice.choice(both), "compute": dice.choice(both)}


def _optimizer(dice: random.Random) -> Tree:
    edges: Tree = {
        "lr": dice.choice((8e-5, 1e-300, 1, 1e9)),
        "schedule": dice.choice(("cosine", "linear", "constant")),
        "warmup": dice.choice((0, 0.03, 1, 1e12)),
        "final_lr": dice.choice((0, 1, 0.1)),
        "weight_decay": dice.choice((0, 0.1, 1e6)),
        "b1": dice.choice((0, 0.9, 1)),
        "b2": dice.choice((0, 0.95, 1)),
        "eps": dice.choice((1e-30, 1e-8, 1)),
        "clip": dice.choice((None, 1e-9, 1)),
        "ema": dice.choice((None, 0, 0.999, 1)),
    }
    return {name: value for name, value in edges.items() if dice.random() < 0.5}


def _prices(dice: random.Random) -> str:
    rows = ("v6e,us-east5-b,2.70,0.40,2026-11-01", "v5e,here,0.0001,,2026-11-01", "v5p,there,1e6,1e5,2026-11-01")
    wrong = ("v6e,here,free,,2026-11-01", "v66,here,1,,2026-11-01", "v6e,here,-1,,2026-11-01", "v6e,,1,,yesterday")
    return PRICES + "\n".join(dice.sample(rows, 2) + ([dice.choice(wrong)] if dice.random() < 0.2 else [])) + "\n"


def _overrides(dice: random.Random, tree: Tree) -> list[str]:
    if dice.random() < 0.7:
        return []
    known = (
        "optimizer.lr=8e-5",
        "remat=full",
        "remat.policy=none",
        "checkpoint.every=7",
        "mesh={fsdp: -1}",
        "name=over",
    )
    chosen = dice.sample(known, dice.choice((1, 1, 2)))
    if isinstance(tree.get("remat"), dict) and tree["remat"].get("keep", tree["remat"].get("offload")):
        chosen = [one for one in chosen if one != "remat.policy=none"]
    return chosen


def _written(dice: random.Random, tree: Tree) -> str:
    """As people write YAML: sections on one line or below each other, numbers such as 8e-5."""
    lines = ["# a comment"] if dice.random() < 0.2 else []
    for name, value in tree.items():
        if isinstance(value, dict) and value and dice.random() < 0.5:
            lines += [f"{_plain(name)}:", *(f"  {_plain(inner)}: {_flow(one)}" for inner, one in value.items())]
        else:
            lines.append(f"{_plain(name)}: {_flow(value)}")
    return "\n".join(lines) + dice.choice(("\n", "\n", "", "\r\n"))


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_plain(name)}: {_flow(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        return f"{value!r}".replace("nan", ".nan").replace("inf", ".inf")
    return _plain(value) if isinstance(value, str) else json.dumps(value)


def _plain(text: str) -> str:
    """Without quotes where YAML needs none."""
    safe = text and text[0].isalpha() and all(letter.isalnum() or letter in "._-/" for letter in text)
    return text if safe and text not in ("true", "false", "null") else json.dumps(text)
