"""Columns of prompts and answers, recognised by their names, and the overrides of a job that select them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from forerun.data.source.rows import RowError

PROMPT_NAMES = ("prompt", "question", "instruction", "input", "query", "problem")
ANSWER_NAMES = ("completion", "answer", "response", "output", "target", "solution")
_THOUGHT_NAMES = ("reasoning", "rationale", "thought", "thinking", "chain_of_thought", "cot", "explanation")
_CONTEXT_NAMES = ("context", "passage", "background", "document", "article")
_SYSTEM_NAMES = ("system", "system_prompt")
_PREFERENCE_NAMES = ("chosen", "rejected")
# Columns that are neither a prompt nor an answer, so they are not the unknown partner of one.
_METADATA_NAMES = (
    "id", "idx", "index", "uuid", "key", "hash", "source", "url", "date", "timestamp", "split", "lang", "language",
    "category", "topic", "tag", "domain", "task", "dataset", "subset", "type", "difficulty", "level", "score", "model",
    "author", "license", "name",
)  # fmt: skip
_WORD = re.compile(r"[\w.-]+")
_MAX_SHOWN = 12


@dataclass(frozen=True)
class NamedRoles:
    """The columns of a file by what their names say. `unnamed` have unknown names."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    contexts: tuple[str, ...]
    systems: tuple[str, ...]
    thoughts: tuple[str, ...]
    unnamed: tuple[str, ...]


def named_roles(names: Iterable[str]) -> NamedRoles:
    """Return the columns by what their names say, each kind in the order of the file."""
    names = list(names)
    name_words = {name: _words(name) for name in names}
    # `source` is metadata, except beside `target`.
    source = [
        name
        for name in names
        if "source" in name_words[name] and any("target" in words for words in name_words.values())
    ]

    def named(likely: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not name_words[name].isdisjoint(likely) and name not in source)

    systems, contexts, thoughts = named(_SYSTEM_NAMES), named(_CONTEXT_NAMES), named(_THOUGHT_NAMES)
    prompts = tuple(name for name in (*named(PROMPT_NAMES), *source) if name not in systems)
    answers = named(ANSWER_NAMES)
    named_columns = {
        *systems,
        *contexts,
        *thoughts,
        *prompts,
        *answers,
        *named(_METADATA_NAMES),
        *named(_PREFERENCE_NAMES),
    }
    return NamedRoles(
        prompts, answers, contexts, systems, thoughts, tuple(name for name in names if name not in named_columns)
    )


def pair_columns(names: Sequence[str]) -> dict[str, str] | None:
    """Return `data.columns` for rows of a prompt and an answer, or None if no name is that of a prompt or an answer.

    Raises:
      RowError: the names leave several readings, or one of the two has an unknown name. The fix names the columns.
    """
    roles = named_roles(names)
    prompts, answers = list(roles.prompts), list(roles.answers)
    if not prompts and not answers:
        return None
    if not prompts or not answers:
        partners = [*roles.unnamed, *(() if prompts else roles.contexts)]
        if not partners:
            return None  # one column of this kind and metadata: not a pair
        if len(partners) > 1:
            raise _undecided(names, _unknown_partner_fix(names, prompts, answers, partners))
        prompts, answers = prompts or partners, answers or partners
    other_content = (*roles.contexts, *roles.systems, *roles.thoughts)
    context = [name for name in (*roles.contexts, *prompts) if name in (*roles.contexts, "input")]
    if "instruction" in prompts and len(context) == 1 and {*prompts} <= {"instruction", *context} and len(answers) == 1:
        # Alpaca, whose input may be empty: no template can express that.
        columns = {"input": column_value(context[0]), "output": column_value(answers[0])}
        if context == ["input"] and not other_content:
            return columns
        if not roles.systems and not roles.thoughts:
            raise _undecided(names, _try(columns, ["instruction", context[0], answers[0]], names))
    if len(prompts) == len(answers) == 1 and not other_content and {prompts[0], answers[0]}.isdisjoint(roles.unnamed):
        return {"prompt": column_value(prompts[0]), "completion": column_value(answers[0])}
    prompt = template([*(name for name in roles.contexts if name not in prompts), *prompts])
    thoughts = "".join(f"<think>{template([name])}</think>" for name in roles.thoughts[:1] if name not in answers)
    used_columns = [*roles.contexts, *prompts, answers[0], *roles.thoughts[:1], *roles.systems[:1]]
    if roles.systems:
        answer = thoughts + template(answers[:1])
        turns = (("system", template(roles.systems[:1])), ("user", prompt), ("assistant", answer))
        messages = ", ".join(f"{{role: {role}, content: {_quoted(content)}}}" for role, content in turns)
        override = shlex.quote(f"data.columns.messages=[{messages}]")
        raise _undecided(names, f"try {override}{unused_text(names, used_columns)}")
    columns = {
        "prompt": prompt if len(prompts) > 1 or roles.contexts else column_value(prompts[0]),
        "completion": thoughts + template(answers[:1]) if thoughts else column_value(answers[0]),
    }
    raise _undecided(names, _try(columns, used_columns, names))


def preference_prompt(names: Sequence[str]) -> str | None:
    """Return the value of `data.columns.prompt` for preference pairs without a column `prompt`, or None.

    Raises:
      RowError: several columns may be the prompt, or parts of it.
    """
    roles = named_roles(names)
    prompt_parts = [*roles.systems, *roles.contexts, *roles.prompts]
    if len(prompt_parts) > 1:
        raise _undecided(
            names,
            _try({"chosen": "chosen", "prompt": template(prompt_parts)}, [*prompt_parts, *_PREFERENCE_NAMES], names),
        )
    return column_value(prompt_parts[0]) if roles.prompts else None


def partner_fix(names: Sequence[str], role: str, used_columns: Iterable[str]) -> str | None:
    """Return the fix for a job that names the prompt or the answer and lacks `role`, the other one. None: unknown."""
    roles = named_roles(name for name in names if name not in used_columns)
    candidates = roles.prompts if role in ("prompt", "instruction") else roles.answers
    candidates = candidates or roles.unnamed
    if not candidates or (len(candidates) > 1 and not (roles.prompts if role == "prompt" else roles.answers)):
        return None
    value = template(candidates) if role == "prompt" and len(candidates) > 1 else column_value(candidates[0])
    return f"add {override_text(role, value)}{unused_text(names, [*used_columns, *candidates])}"


def require_prompt(names: Sequence[str], text: str) -> None:
    """Raise RowError if the column `text`, which the job reads as plain text, holds the answers to unused prompts."""
    roles = named_roles(names)
    if text not in roles.answers or not roles.prompts:
        return
    columns = {
        "prompt": template(roles.prompts) if len(roles.prompts) > 1 else column_value(roles.prompts[0]),
        "completion": column_value(text),
    }
    overrides = " ".join(override_text(role, value) for role, value in columns.items())
    raise RowError(
        "E-DATA-224",
        f"data.columns.text={text} trains on answers without their prompts",
        why=f"the column {roles.prompts[0]} is not used; the columns: {shortened(names)}",
        fix=f"remove data.columns.text, and add {overrides}; to train on the answers alone, write a template: "
        f"{override_text('text', template([text]))}",
    )


def column_value(name: str) -> str:
    """Return the value of `data.columns.ROLE` that names a column, with literal braces."""
    return name.replace("{", "{{").replace("}", "}}")


def template(names: Sequence[str]) -> str:
    """Return the template that joins columns with line ends."""
    return "\n".join(f"{{{name}}}" for name in names)


def override_text(role: str, value: str) -> str:
    """Return an override of `data.columns`, quoted for YAML and for a shell if that is needed."""
    is_plain = _WORD.fullmatch(value) is not None and isinstance(yaml.safe_load(value), str)
    return f"data.columns.{role}={value}" if is_plain else shlex.quote(f"data.columns.{role}={_quoted(value)}")


def unused_text(names: Sequence[str], used_columns: Sequence[str]) -> str:
    """Return a note about the columns that a proposal does not use, or "" if it uses all."""
    unused = [name for name in names if name not in used_columns]
    if not unused:
        return ""
    joined = f'"{{{used_columns[0]}}} {{{unused[0]}}}"'
    return f" (not used: {', '.join(unused)}; to join columns, write a template such as {joined})"


def shortened(names: Sequence[str]) -> str:
    """Return the first 12 names, separated by commas."""
    return ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")


def _words(name: str) -> set[str]:
    """Return a name in lower case and the last word of it, each also without the s of a plural."""
    lower = name.strip().lower().replace("-", "_")
    words = {lower, lower.rpartition("_")[2]}
    return words | {word.removesuffix("s") for word in words}


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _try(columns: Mapping[str, str], used_columns: Sequence[str], names: Sequence[str]) -> str:
    overrides = " ".join(override_text(role, value) for role, value in columns.items())
    return f"try {overrides}{unused_text(names, used_columns)}"


def _unknown_partner_fix(
    names: Sequence[str], prompts: Sequence[str], answers: Sequence[str], partners: Sequence[str]
) -> str:
    named_columns = {"prompt": prompts, "completion": answers}
    overrides = " ".join(
        override_text(role, column_value(columns[0])) if columns else f"data.columns.{role}=NAME"
        for role, columns in named_columns.items()
    )
    note = unused_text(names, [*prompts[:1], *answers[:1], *partners])
    return f"{overrides}, where NAME is one of: {', '.join(partners)}{note}"


def _undecided(names: Sequence[str], fix: str) -> RowError:
    return RowError(
        "E-DATA-225",
        "the columns of the prompt and of the answer are not certain",
        why=f"the columns: {shortened(names)}",
        fix=fix,
    )
