"""What a row holds, told from its column names, and which column is the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forerun.errors import UserError, did_you_mean

FORMS = {
    "text": ("text",),
    "messages (chat)": ("messages",),
    "chosen/rejected (preference pairs)": ("chosen", "rejected"),
    "prompt/completion": ("prompt", "completion"),
    "input_ids (tokenized already)": ("input_ids",),
}
_OFTEN_TEXT = ("content", "body", "document", "article", "story", "raw_text", "txt")
_MANY = 12


def form_of(names: Iterable[str], columns: Mapping[str, str]) -> str | None:
    """The first form whose columns are all there; `columns` maps our names to the file's."""
    there = set(names)
    for form, roles in FORMS.items():
        if all(columns.get(role, role) in there for role in roles):
            return form
    return None


@dataclass(frozen=True)
class TextColumn:
    """The column that is trained on."""

    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.columns.get("text", "text")

    def require(self, names: Iterable[str], where: str) -> None:
        """The column is among `names`, those of the file or row at `where`."""
        names = list(names)
        if self.name in names:
            if names.count(self.name) > 1:
                raise UserError(f"{where}: two columns {self.name!r}", why=", ".join(names), fix="rename one of them")
            return
        form = None if "text" in self.columns else form_of(names, self.columns)
        if form is not None:
            later = "tokenized data" if "input_ids" in form else "supervised fine-tuning"
            raise UserError(
                f"{where}: found {form}, which cannot be trained on yet",
                why=f"training is next-token on plain text; {later} is not there yet",
                fix="write what is to be learned into a column named text",
            )
        known = [name for name in _OFTEN_TEXT if name in names]
        near = did_you_mean(self.name, names) or (known[0] if known else None)
        shown = ", ".join(names[:_MANY]) + (", ..." if len(names) > _MANY else "")
        raise UserError(
            f"{where}: no column {self.name!r}",
            why=f"its columns: {shown or 'none'}",
            fix=f"did you mean data.columns.text={near}?" if near else "name the text column: data.columns.text=NAME",
        )

    def text(self, value: object, where: str) -> str:
        """`value` if it is text that can be written as UTF-8."""
        if not isinstance(value, str):
            raise UserError(
                f"{where}: column {self.name!r} holds {_kind(value)}, not text",
                why=f"it is {_short(value)}",
                fix="mend or delete this row, or name another column: data.columns.text=NAME",
            )
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where}: column {self.name!r} holds half a character",
                    why=f"character {error.start} is \\u{ord(value[error.start]):04x}, half of a surrogate pair",
                    fix="mend or delete this row",
                ) from error
        return value


def _kind(value: object) -> str:
    names = {bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    shown = repr(value) if not isinstance(value, (list, dict)) else f"{_kind(value)} of {len(value)}"
    return shown if len(shown) <= 40 else shown[:40] + "..."
