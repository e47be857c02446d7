"""The mistakes that people and editors make in job files: wrong names, types and sizes, and YAML gone wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Tree = dict[str, Any]

DATA = "words.txt"  # stands beside every job file
BAD_GLOBS = ("v9-*", "v6e-7", "h100-8", "v5e", "", ",", "v5p-2x2", "*-3", "v6e-8,nothing", "[")
BAD_OVERRIDES = (
    "steps",
    "=3",
    "batch.size=3",
    "optimiser.lr=1",
    "mesh.tp=two",
    "optimizer.lr=1e-4x",
    "model.layers=[1",
    "a..b=1",
    "data=",
    "mesh=8",
    "sample.prompt=a: b",
    "model.options.x=1",
    "steps=" + "9" * 5000,
)


def _unknown_key(dice: random.Random, tree: Tree) -> None:
    near = dice.choice(("batchsize", "seqence", "lr", "optimzer", "modle", "mesh_tp", "Größe", "step", "learning rate"))
    tree[near] = dice.choice((1, "x", {"y": 2}, None, []))


def _unknown_inner_key(dice: random.Random, tree: Tree) -> None:
    section = dice.choice(("optimizer", "mesh", "precision", "checkpoint", "sample"))
    inner = tree.get(section)
    key = dice.choice(("learning_rate", "tensor", "dtype", "evry", "params_", "модель", "lr "))
    tree[section] = {**(inner if isinstance(inner, dict) else {}), key: 1}


def _wrong_type(dice: random.Random, tree: Tree) -> None:
    key = dice.choice(
        ("batch", "sequence", "steps", "micro_batch", "seed", "name", "model", "data", "mesh", "attention")
    )
    tree[key] = dice.choice((1.5, 32.0, True, "thirty-two", [1], {}, {"a": 1}, None, -1, 0, "", [], 7))


def _wrong_inner_type(dice: random.Random, tree: Tree) -> None:
    section, key = dice.choice(
        (("optimizer", "lr"), ("optimizer", "b1"), ("mesh", "fsdp"), ("checkpoint", "every"), ("precision", "params"))
    )
    tree[section] = {key: dice.choice((0, -1, -2, 2, "8e-5x", None, [], {}, True, "fp8", float("nan"), float("inf")))}


def _heads_that_do_not_divide(dice: random.Random, tree: Tree) -> None:
    odd = ({"embed": 7, "heads": 3}, {"embed": 64, "heads": 4, "kv_heads": 3}, {"embed": 2, "heads": 64})
    tree["model"] = {"layers": 2, "vocab": 512, **dice.choice(odd)}


def _half_a_model(dice: random.Random, tree: Tree) -> None:
    tree["model"] = dice.choice(
        (
            *({}, {"layers": 2}, {"heads": 2, "embed": 8}, {"name": "no.module:Net", "layers": 3}, {"name": ""}),
            *("qwen3", "Llama3.1-8B", "gpt-5", "no.module:Net", "os:nothing"),
            *(":Net", "net:", ".net:Net", "json:loads", "a b:c"),
        )
    )


def _odd_mesh(dice: random.Random, tree: Tree) -> None:
    tree["mesh"] = dice.choice(
        (
            {"data": -1, "fsdp": -1},
            {"data": -1, "fsdp": -1, "tp": -1},
            {"data": 3, "fsdp": 5, "tp": 7},
            {"tp": 4096},
            {"tp": 3},
            {"data": 0},
            {"fsdp": -8},
            {"fsdp": 10**12},
            [1, 8, 1],
            "1x8x1",
        )
    )


def _odd_remat(dice: random.Random, tree: Tree) -> None:
    tree["remat"] = dice.choice(
        (
            "some",
            {"policy": "named", "keep": ["atention_out"]},
            {"policy": "full", "keep": ["query"]},
            {"policy": "named", "keep": ["query"], "offload": ["query"]},
            {"policy": "named", "keep": "query"},
            {"policy": "named", "keep": [1, None]},
            {"policy": ["named"]},
            ["full"],
        )
    )


def _two_lengths(dice: random.Random, tree: Tree) -> None:
    tree["steps"], tree["epochs"] = dice.choice(((10, 1), (10, 0.5), (None, -1), (None, 0), (None, 1e300)))


def _no_data(dice: random.Random, tree: Tree) -> None:
    tree.pop("steps", None)
    tree["data"] = dice.choice(
        (
            "nowhere",
            {"path": ""},
            {"path": DATA, "tokenizer": "no/tokenizer.json"},
            {"path": DATA, "tokenizer": DATA},
            ".",
        )
    )


def _missing(dice: random.Random, tree: Tree) -> None:
    for key in dice.choice((("data",), ("model",), ("model", "data"))):
        tree.pop(key, None)


def _odd_name(dice: random.Random, tree: Tree) -> None:
    tree["name"] = dice.choice(("../up", "ünïcode", ".hidden", "a/b", "", "a b", "作业", "x" * 5000, "-", "nul\u200b"))


def _absurd_numbers(dice: random.Random, tree: Tree) -> None:
    key = dice.choice(("batch", "sequence", "steps", "micro_batch", "log_every", "loss_chunk", "seed"))
    tree[key] = dice.choice((10**9, 10**12, 10**18, 10**30, 10**400))


def _absurd_model(dice: random.Random, tree: Tree) -> None:
    key = dice.choice(("layers", "embed", "mlp", "vocab", "head_dim", "heads"))
    tree["model"] = {"layers": 2, "embed": 64, "heads": 1, "vocab": 512, "head_dim": 64}
    tree["model"][key] = dice.choice((10**7, 10**12, 10**30, 10**400))


def _indivisible_batch(dice: random.Random, tree: Tree) -> None:
    tree["batch"], tree["micro_batch"] = dice.choice(((7, 2), (13, 13), (31, None), (64, 5), (8, 16), (999_983, 2)))


TREE_MISTAKES: tuple[Callable[[random.Random, Tree], None], ...] = (
    _unknown_key,
    _unknown_inner_key,
    _wrong_type,
    _wrong_inner_type,
    _heads_that_do_not_divide,
    _half_a_model,
    _odd_mesh,
    _odd_remat,
    _two_lengths,
    _no_data,
    _missing,
    _odd_name,
    _absurd_numbers,
    _absurd_model,
    _indivisible_batch,
)


def _tabs(dice: random.Random, text: str) -> str:
    return text + "mesh:\n\ttp: 2\n"


def _twice(dice: random.Random, text: str) -> str:
    return f"batch: 8\n{text}batch: 8\n"


def _not_a_mapping(dice: random.Random, text: str) -> str:
    return dice.choice(("", "\n\n# nothing\n", "- model\n- data\n", "just words\n", "42\n", "null\n", "{}\n", "[]\n"))


def _anchors(dice: random.Random, text: str) -> str:
    return text + dice.choice(("x: &a 1\ny: *a\n", "runs: !!str r\n", "runs: *nothing\n", "<<: {seed: 1}\n"))


def _torn(dice: random.Random, text: str) -> str:
    return text[: dice.randrange(len(text))] + dice.choice(("{", "\x00", ": :", "'", "\ufeff", "]", "\x85", "%", "@"))


def _two_documents(dice: random.Random, text: str) -> str:
    return f"{text}---\n{text}"


def _old_booleans(dice: random.Random, text: str) -> str:
    return text + dice.choice(
        ("loss_chunk: yes\n", "runs: no\n", "runs: 2026-11-01\n", "log_every: 1_000\n", "seed: 0x1F\n")
    )


def _deep(dice: random.Random, text: str) -> str:
    return text + "runs: " + "[" * 500 + "]" * 500 + "\n"


TEXT_MISTAKES: tuple[Callable[[random.Random, str], str], ...] = (
    _tabs,
    _twice,
    _not_a_mapping,
    _anchors,
    _torn,
    _two_documents,
    _old_booleans,
    _deep,
)
