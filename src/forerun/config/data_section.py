"""The `data` section of a job: where the text is, how it becomes tokens and rows, and what is held out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from forerun.config.section import Section, about, shorthand

COLUMNS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "input_ids")


def _columns() -> Any:
    return Field(
        default_factory=dict,
        description="what the file's columns are called, as in {text: content}",
        json_schema_extra={
            "reason": "text, messages, prompt and completion, input_ids",
            "propertyNames": {"enum": list(COLUMNS)},
        },
    )


def _separator() -> Any:
    return about(
        "text that separates documents in a text file or in a text column, such as <|endoftext|>",
        "none: a text file is one document, and so is a row",
        None,
        min_length=1,
        max_length=1024,
    )


class Part(Section):
    """One source of a mixture."""

    path: str = about("as data.path", "the job must say it")
    weight: float | None = about(
        "its share of the rows, against the other weights", "none anywhere: every row once per epoch", None, gt=0
    )
    columns: dict[str, str] = _columns()
    separator: str | None = _separator()

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"data.columns: unknown {unknown[0]!r}; known: {', '.join(COLUMNS)}")
        return columns


class Data(Section):
    path: str | None = about(
        "a file, a folder or a glob: text, JSONL, CSV, Parquet, Arrow; hf://datasets/owner/name", "or a mixture", None
    )
    mixture: dict[str, Annotated[Part, shorthand("path")]] = Field(
        default_factory=dict,
        description="several sources by name, each with path, weight and columns",
        json_schema_extra={"reason": "one source: path"},
    )
    tokenizer: str | None = about(
        "'bytes', the path of a tokenizer.json, or a folder that has one",
        "a checkpoint's own; without one, bytes, but not for chat",
        None,
    )
    columns: dict[str, str] = _columns()
    separator: str | None = _separator()
    packing: Literal["auto", "concatenate", "whole"] = about(
        "concatenate: one stream, cut into rows; whole: documents stay in one piece",
        "auto: text is concatenated, chat stays whole",
        "auto",
    )
    too_long: Literal["auto", "split", "keep_start", "keep_end", "drop", "stop"] = about(
        "what a document longer than the sequence becomes, when documents stay whole",
        "auto: split, so nothing is lost; of a preference pair the shared prompt loses its start",
        "auto",
    )
    loss_on: Literal["answers", "all"] = about(
        "tokens that are learned: the assistant's or the completion, or all",
        "answers: nobody trains a model to ask; plain text is learned whole",
        "answers",
    )
    chat_template: str | None = about(
        "a Jinja file, or 'chatml'", "the checkpoint's own; without one the job must say it", None
    )
    apply_template: bool | None = about(
        "write prompt and completion rows, and preference pairs of plain texts, with the chat template: the prompt as "
        "the user's message, the completion as the assistant's",
        "off: plain texts are joined as they are, with a warning if the model has a chat template",
        None,
    )
    special_tokens: bool = about(
        "special tokens written out in a text count as such", "no: a text cannot forge the end of a turn", False
    )
    validation: float = about("share of the data held out for validation", "none", 0.0, ge=0, lt=1)
    validation_by: Literal["documents", "rows"] = about(
        "documents: held out by the hash of their content; rows: packed rows of `sequence` tokens, an exact share",
        "documents: no document is on both sides, whatever the sequence",
        "documents",
    )
    bad_rows: float = about(
        "bad rows that may be passed over: a share if below 1, else a number", "0: the first one stops", 0.0, ge=0
    )
    bad_files: int = about("damaged files that may be passed over", "0: the first one stops", 0, ge=0)
    store: str | None = about("folder of the tokenized documents", "~/.cache/forerun/tokens", None)
    workers: int | None = about("processes that tokenize", "one per core", None, gt=0, le=1024)
    feeders: int = about("processes that build batches", "0: threads, fast enough for most", 0, ge=0, le=256)
    ledger: bool = about("write the example ids of every step to ledger.jsonl", "off: a line a step", False)

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: dict[str, str]) -> dict[str, str]:
        return Part(path="", columns=columns).columns

    @model_validator(mode="after")
    def _one_place(self) -> Data:
        if not self.path and not self.mixture:
            raise ValueError("data.path is missing: a file, a folder or a glob; or name several in data.mixture")
        if self.path and self.mixture:
            raise ValueError("data.path and data.mixture are both given: keep one")
        for key in ("columns", "separator"):
            if self.mixture and getattr(self, key):
                raise ValueError(f"data.{key} beside data.mixture: write {key} into each part of the mixture")
        given = [part.weight is not None for part in self.mixture.values()]
        if any(given) and not all(given):
            raise ValueError("data.mixture: give every part a weight, or none of them")
        return self

    @property
    def parts(self) -> dict[str, Part]:
        """The sources by name; a single one is called data."""
        return self.mixture or {"data": Part(path=self.path or "", columns=self.columns, separator=self.separator)}

    @property
    def where(self) -> str:
        """For messages: the path, or the names of the mixture."""
        return self.path or f"mixture of {', '.join(self.mixture)}"
