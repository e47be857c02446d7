"""Checks of a tokenizer against the model's vocabulary and against the teacher's tokenizer. Does not import jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.config.schema import Job
from forerun.data.tokenizer import FileTokenizer, Tokenizer, checkpoint_tokenizer
from forerun.errors import UserError
from forerun.models.model_facts import ModelFacts

PROBE = "".join(map(chr, range(32, 0x250))) + "\n\t Привет, 世界 🌍\u200d! def f(x): return x ** 12345  "
PARTS = ("model", "normalizer", "pre_tokenizer")
SHOWN = 3


def require_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise if the tokenizer has more ids than the model's vocabulary."""
    if tokenizer.vocab > vocab:
        raise UserError(
            "E-RUN-017",
            f"the tokenizer has {tokenizer.vocab} ids, the model's vocabulary only {vocab}",
            why="ids beyond the embedding table would be clamped silently on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={tokenizer.vocab} for random weights; "
            "model.new_tokens adds tokens to a checkpoint",
        )


def compares_without_data(job: Job, student: ModelFacts, teacher: ModelFacts) -> bool:
    """Return whether both tokenizers are known without the data. In a plan, tokenizers may be missing."""
    return bool(job.data.tokenizer or student.has_tokenizer) and teacher.has_tokenizer


def require_same_tokenizer(teacher: ModelFacts, student: Tokenizer) -> None:
    """Raise if the token ids of teacher and student differ. A teacher without files has no tokenizer to compare."""
    if teacher.snapshot is None:
        return
    found = [*token_differences(student, checkpoint_tokenizer(teacher.snapshot))]
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UserError(
            "E-RUN-042",
            f"distil.teacher: the tokenizer of {teacher.section.name} is not the student's",
            why="; ".join(found[:SHOWN]) + more,
            fix="use a teacher and a student of one family; or, for a student with random weights, set "
            "data.tokenizer=TEACHER/tokenizer.json",
        )


def token_differences(student: Tokenizer, teacher: Tokenizer) -> Iterator[str]:
    """Yield descriptions of the differences between two tokenizers.

    Their contents are compared if both are files. Otherwise, the tokens of a test string are compared.
    """
    if isinstance(student, FileTokenizer) and isinstance(teacher, FileTokenizer):
        ours, theirs = student.content(), teacher.content()
        yield from _other_tokens(_tokens(ours), _tokens(theirs))
        for part in PARTS:
            yield from _other_part(part, ours.get(part), theirs.get(part))
    elif student.encode(PROBE).tolist() != teacher.encode(PROBE).tolist():
        yield f"a test string has different tokens: {student.name} for the student, {teacher.name} for the teacher"
    if student.eos != teacher.eos:
        yield f"a document ends with token {student.eos} for the student, {teacher.eos} for the teacher"


def _other_tokens(ours: dict[int, str], theirs: dict[int, str]) -> Iterator[str]:
    for number in sorted({*ours, *theirs}):
        if ours.get(number) != theirs.get(number):
            here, there = (f"{x[number]!r}" if number in x else "nothing" for x in (ours, theirs))
            yield f"token {number} is {here} to the student, {there} to the teacher"


def _other_part(part: str, ours: Any, theirs: Any) -> Iterator[str]:
    if part == "model":
        ours, theirs = (
            {name: value for name, value in (one or {}).items() if name != "vocab"} for one in (ours, theirs)
        )
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                yield f"model.{name} of their tokenizer.json differs"
    elif ours != theirs:
        yield f"{part} of their tokenizer.json differs"


def _tokens(content: dict[str, Any]) -> dict[int, str]:
    vocab = content.get("model", {}).get("vocab") or {}
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], number) for number, entry in enumerate(vocab))
    found = {int(number): str(text) for text, number in pairs}
    return found | {int(one["id"]): str(one["content"]) for one in content.get("added_tokens", ())}
