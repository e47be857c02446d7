"""Comparison of a checkpoint's tensors with those of the model. All differences are reported in one error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.errors import UserError
from forerun.hub.files import shown
from forerun.hub.safetensors import Weights, equal_bytes
from forerun.models.keys import Entry, Stack, Tensor, entries, unused_names
from forerun.nn.spec import Tree

READABLE = ("F64", "F32", "F16", "BF16")
SHOWN_FAULTS = 10

_HEAD = "lm_head.weight"  # in the files of a family that always ties it
_GPT2_PREFIX = "transformer."  # GPT-2 checkpoints exist with and without it
_BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_GPT2_BUFFERS = re.compile(r"^(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)$")


class Stacked(Protocol):
    """The members of a model that are needed to find the names of its tensors."""

    @property
    def stacks(self) -> tuple[Stack, ...]: ...

    def specs(self) -> Tree: ...


@dataclass(frozen=True)
class Match:
    """A tensor of the model, and its name in a particular checkpoint."""

    entry: Entry
    name: str


def matches(weights: Weights, table: Iterable[Tensor], model: Stacked) -> list[Match]:
    """Return every tensor of the model with its name in `weights`.

    Known buffers in older files and parameters that no code uses are ignored. The head of a tied model is ignored if it
    equals the embedding.

    Args:
        weights: The tensors of the checkpoint.
        table: The tensor table of the family.
        model: The model.

    Raises:
        UserError: Tensors are missing, unexpected, of another shape, or not floats.
    """
    table = tuple(table)
    expected = entries(table, model.specs(), model.stacks)
    head = next((one.name for one in table if any(part.leaf == "head" for part in one.parts)), _HEAD)
    unused = unused_names(table, model.specs(), model.stacks)
    gpt2 = all(entry.name.startswith(_GPT2_PREFIX) for entry in expected)
    bare = gpt2 and not any(name.startswith(_GPT2_PREFIX) for name in weights)
    found = [Match(entry, entry.name.removeprefix(_GPT2_PREFIX) if bare else entry.name) for entry in expected]
    faults = [*_missing(weights, found), *_misfits(weights, found), *_unexpected(weights, found, head, unused, gpt2)]
    if faults:
        raise _refusal(weights, found, head, faults)
    return found


def dtypes_of(weights: Weights, table: Iterable[Tensor], model: Stacked) -> dict[str, str]:
    """Return the dtype of every tensor, by the name that an export gives it."""
    return {match.entry.name: weights[match.name].dtype for match in matches(weights, table, model)}


def _missing(weights: Weights, found: Sequence[Match]) -> Iterator[str]:
    return (f"missing: {match.name} {list(match.entry.shape)}" for match in found if match.name not in weights)


def _misfits(weights: Weights, found: Sequence[Match]) -> Iterator[str]:
    for match in found:
        info = weights.get(match.name)
        if info is None:
            continue
        if info.shape != match.entry.shape:
            yield f"wrong shape: {match.name} is {list(info.shape)}, the model needs {list(match.entry.shape)}"
        elif info.dtype not in READABLE:
            yield f"wrong dtype: {match.name} is {info.dtype}, forerun reads {', '.join(READABLE)}"


def _unexpected(weights: Weights, found: Sequence[Match], head: str, unused: set[str], gpt2: bool) -> Iterator[str]:
    known = {match.name for match in found} | unused
    for name in weights:
        if name in known or _BUFFERS.search(name) or (gpt2 and _GPT2_BUFFERS.search(name)):
            continue
        if name != head:
            yield f"unexpected: {shown(name)} {list(weights[name].shape)}"
        elif difference := _head_difference(weights, found, head):
            yield f"unexpected: {head}, though config.json ties it to the embedding: {difference}"


def _head_difference(weights: Weights, found: Sequence[Match], head: str) -> str | None:
    """Return how a stored head differs from the embedding that it is tied to, or None if they are bitwise equal."""
    holds = (match.name for match in found if any(piece.path == "embed" for piece in match.entry.pieces))
    embed = next(holds, None)
    if embed is None or embed not in weights:
        return f"the checkpoint has no {embed or 'embedding'}"
    first, second = weights[embed], weights[head]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"it is {second.dtype}{list(second.shape)}, {embed} is {first.dtype}{list(first.shape)}"
    same = equal_bytes(weights.view(embed), weights.view(head))
    weights.release(embed)
    weights.release(head)
    return None if same else "its values differ"


def _refusal(weights: Weights, found: Sequence[Match], head: str, faults: list[str]) -> UserError:
    lines = faults[:SHOWN_FAULTS]
    if len(faults) > SHOWN_FAULTS:
        lines.append(f"and {len(faults) - SHOWN_FAULTS} more")
    return UserError(
        "E-WEIGHTS-003",
        f"the tensors in {weights.folder} are not those of the model: "
        f"{len(faults)} {'difference' if len(faults) == 1 else 'differences'}",
        why="\n".join(lines),
        fix=_fix(weights, found, head, faults),
    )


def _fix(weights: Weights, found: Sequence[Match], head: str, faults: list[str]) -> str:
    again = 'AutoModelForCausalLM.from_pretrained("...").save_pretrained("folder")'
    missing = [match.name for match in found if match.name not in weights]
    if missing and any(name.removeprefix("model.") in weights for name in missing):
        return f"its names lack `model.`: save it as a causal language model, then name that folder:\n{again}"
    if any(fault.startswith("wrong dtype") for fault in faults):
        return "use the checkpoint in bfloat16, float16 or float32, not a quantized one"
    if all(head in fault for fault in faults) and head in weights:
        return 'set "tie_word_embeddings": false in its config.json, if the head should be separate'
    return "check that config.json and the weights belong together; if they should, download the checkpoint again"
