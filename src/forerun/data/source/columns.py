"""The form of a row, recognised from its column names, and the column of each role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.data.source.rows import RowError
from forerun.errors import did_you_mean

FORMS = {
    "text": ("text",),
    "messages": ("messages",),
    "chosen/rejected": ("chosen", "rejected"),
    "prompt/completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
}
OPTIONAL = {"chosen/rejected": ("prompt",), "input_ids": ("loss_mask",)}
SHOWN = {
    "text": "",
    "messages": "chat, ",
    "chosen/rejected": "preference pairs, ",
    "prompt/completion": "prompt and completion, ",
    "input_ids": "already tokenized, ",
}
_COMMON_TEXT_NAMES = ("content", "body", "document", "article", "story", "raw_text", "txt")
_COMMON_NAMES = {
    ("conversations",): "data.columns.messages=conversations",
    ("conversation",): "data.columns.messages=conversation",
    ("question", "answer"): "data.columns.prompt=question data.columns.completion=answer",
    ("prompt", "response"): "data.columns.completion=response",
    ("instruction", "output"): "data.columns.prompt=instruction data.columns.completion=output",
}
_MAX_SHOWN = 12


@dataclass(frozen=True)
class Columns:
    """The form of every row, and the column of the file for each role."""

    form: str
    given: Mapping[str, str]

    def name(self, role: str) -> str:
        """Return the column of the file for a role."""
        return self.given.get(role, role)

    @property
    def needed(self) -> dict[str, str]:
        """Role to column, for the columns that every row must have."""
        return {role: self.name(role) for role in FORMS[self.form]}

    @property
    def known(self) -> dict[str, str]:
        """Role to column, for required and optional columns."""
        return self.needed | {role: self.name(role) for role in OPTIONAL.get(self.form, ())}

    @property
    def shown(self) -> str:
        """A description for the display, such as `chat, column conversations`."""
        names = list(self.needed.values())
        return f"{SHOWN[self.form]}column{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def require(self, names: Iterable[str]) -> None:
        """Raise RowError if a needed column is missing in `names`, or is in it more than once."""
        names = list(names)
        for role, name in self.needed.items():
            if name not in names:
                raise missing(names, role, name)
            if names.count(name) > 1:
                raise RowError("E-DATA-023", f"two columns {name!r}", why=shortened(names), fix="rename one of them")


def form_of(names: Iterable[str], given: Mapping[str, str]) -> str | None:
    """Return the first form whose columns all exist, or None.

    `given` maps roles to columns of the file. If it contains roles of some forms, only these forms are considered.
    """
    existing = set(names)
    intended = [form for form, roles in FORMS.items() if any(role in given for role in roles)]
    for form in intended or FORMS:
        if all(given.get(role, role) in existing for role in FORMS[form]):
            return form
    return None


def recognised(names: Iterable[str], given: Mapping[str, str]) -> Columns:
    """Return the form of a row with the columns `names`. Raise RowError for the missing column if it has none."""
    names = list(names)
    form = form_of(names, given)
    if form is None:
        intended = next((form for form, roles in FORMS.items() if any(role in given for role in roles)), "text")
        role = next(role for role in FORMS[intended] if given.get(role, role) not in names)
        raise missing(names, role, given.get(role, role), given)
    return Columns(form, dict(given))


def missing(names: Sequence[str], role: str, name: str, given: Mapping[str, str] | None = None) -> RowError:
    """Return the error for a missing column. Its fix proposes a column of `names` that is likely intended."""
    fix = f"name the {role} column: data.columns.{role}=NAME"
    likely = [name for name in _COMMON_TEXT_NAMES if name in names] if role == "text" else []
    near = did_you_mean(name, names) or (likely[0] if likely else None)
    if near:
        fix = f"did you mean data.columns.{role}={near}?"
    elif not given:
        fix = next((f"try {keys}" for found, keys in _COMMON_NAMES.items() if set(found) <= set(names)), fix)
    return RowError("E-DATA-024", f"no column {name!r}", why=f"its columns: {shortened(names) or 'none'}", fix=fix)


def shortened(names: Sequence[str]) -> str:
    """Return the first 12 names, separated by commas."""
    return ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
