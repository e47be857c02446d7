"""What a row holds: its form, told from the column names, and the column of each role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.data.source.rows import Bad, Place
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
    "input_ids": "tokenized already, ",
}
_OFTEN_TEXT = ("content", "body", "document", "article", "story", "raw_text", "txt")
_OFTEN = {
    ("conversations",): "data.columns.messages=conversations",
    ("conversation",): "data.columns.messages=conversation",
    ("question", "answer"): "data.columns.prompt=question data.columns.completion=answer",
    ("prompt", "response"): "data.columns.completion=response",
    ("instruction", "output"): "data.columns.prompt=instruction data.columns.completion=output",
}
_MANY = 12


class Unfit(Exception):
    """What is wrong with a row or a file, before its place is known."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def at(self, file: str, number: int | None = None, word: str = "line", *, whole_file: bool = False) -> Bad:
        return Bad(Place(file, number, word), self.what, self.why, self.fix, whole_file)


@dataclass(frozen=True)
class Columns:
    """The form of every row, and which column of the file has which role."""

    form: str
    given: Mapping[str, str]

    def name(self, role: str) -> str:
        return self.given.get(role, role)

    @property
    def needed(self) -> dict[str, str]:
        """Role to column, for those that every row must have."""
        return {role: self.name(role) for role in FORMS[self.form]}

    @property
    def known(self) -> dict[str, str]:
        """Role to column, those that a row may have included."""
        return self.needed | {role: self.name(role) for role in OPTIONAL.get(self.form, ())}

    @property
    def shown(self) -> str:
        """For the display: `chat, column conversations`."""
        names = list(self.needed.values())
        return f"{SHOWN[self.form]}column{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def require(self, names: Iterable[str]) -> None:
        """Every needed column is among `names`, and once."""
        names = list(names)
        for role, name in self.needed.items():
            if name not in names:
                raise missing(names, role, name)
            if names.count(name) > 1:
                raise Unfit(f"two columns {name!r}", why=shortened(names), fix="rename one of them")


def form_of(names: Iterable[str], given: Mapping[str, str]) -> str | None:
    """The first form whose columns are all there. A form with a role in `given` (ours to the file's) is meant."""
    there = set(names)
    meant = [form for form, roles in FORMS.items() if any(role in given for role in roles)]
    for form in meant or FORMS:
        if all(given.get(role, role) in there for role in FORMS[form]):
            return form
    return None


def recognised(names: Iterable[str], given: Mapping[str, str]) -> Columns:
    """The form of a row with columns `names`, or what is missing."""
    names = list(names)
    form = form_of(names, given)
    if form is None:
        meant = next((form for form, roles in FORMS.items() if any(role in given for role in roles)), "text")
        role = next(role for role in FORMS[meant] if given.get(role, role) not in names)
        raise missing(names, role, given.get(role, role), given)
    return Columns(form, dict(given))


def missing(names: Sequence[str], role: str, name: str, given: Mapping[str, str] | None = None) -> Unfit:
    fix = f"name the {role} column: data.columns.{role}=NAME"
    likely = [name for name in _OFTEN_TEXT if name in names] if role == "text" else []
    near = did_you_mean(name, names) or (likely[0] if likely else None)
    if near:
        fix = f"did you mean data.columns.{role}={near}?"
    elif not given:
        fix = next((f"try {keys}" for found, keys in _OFTEN.items() if set(found) <= set(names)), fix)
    return Unfit(f"no column {name!r}", why=f"its columns: {shortened(names) or 'none'}", fix=fix)


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_MANY]) + (", ..." if len(names) > _MANY else "")
