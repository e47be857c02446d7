"""The `data` section of a job: the sources, tokenization, packing, and the held-out share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from forerun.config.column_template import COLUMNS, check_columns
from forerun.config.section import Section, about, shorthand
from forerun.errors import JobValueError

MessageField = Literal["reasoning_content", "reasoning", "thinking", "tool_calls", "tools"]
ColumnValue = str | list[dict[str, str]]  # a column, a template of columns, or the messages of a conversation


def _columns() -> Any:
    return Field(
        default_factory=dict,
        description="names of the file's columns, for example {text: content}, or templates of columns, for example "
        '{text: "{question} {answer}"}',
        json_schema_extra={
            "reason": "standard names: text, messages, prompt and completion, input_ids",
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


def _limit() -> Any:
    return about("number of rows to use: the first ones, in the order of the files", "all rows", None, gt=0)


class Part(Section):
    """One source of a mixture."""

    path: str = about("as data.path", "no default")
    weight: float | None = about(
        "share of the rows, relative to the other weights", "no part has a weight: every row once per epoch", None, gt=0
    )
    columns: dict[str, ColumnValue] = _columns()
    separator: str | None = _separator()
    limit: int | None = _limit()

    @field_validator("columns", mode="before")
    @classmethod
    def _known(cls, columns: Any) -> Any:
        return check_columns(columns)


class Data(Section):
    """The data of a job, and how it becomes rows of tokens."""

    path: str | None = about(
        "a file, a folder or a glob: text, JSONL, CSV, Parquet, Arrow; hf://datasets/owner/name",
        "the sources are in data.mixture",
        None,
    )
    mixture: dict[str, Annotated[Part, shorthand("path")]] = Field(
        default_factory=dict,
        description="several sources by name, each with path, weight and columns",
        json_schema_extra={"reason": "empty: one source, data.path"},
    )
    tokenizer: str | None = about(
        "'bytes', a tokenizer.json, a folder that contains one, or owner/name[@revision] on the hub",
        "the checkpoint's own; without a checkpoint, bytes, except for chat",
        None,
    )
    columns: dict[str, ColumnValue] = _columns()
    separator: str | None = _separator()
    limit: int | None = _limit()
    packing: Literal["auto", "concatenate", "whole"] = about(
        "concatenate: join documents and cut the stream into rows; whole: keep each document in one piece",
        "auto: concatenate for text, whole for chat",
        "auto",
    )
    too_long: Literal["auto", "split", "keep_start", "keep_end", "drop", "stop"] = about(
        "what happens to a document that is longer than the sequence, with packing: whole",
        "auto: split, so nothing is lost; a preference pair loses the start of its shared prompt",
        "auto",
    )
    loss_on: Literal["answers", "all"] = about(
        "tokens with loss: answers (the assistant's messages or the completion), or all",
        "answers: the model should not learn to ask; plain text has loss on all tokens",
        "answers",
    )
    chat_template: str | None = about(
        "a Jinja file, or 'chatml'", "the checkpoint's own; required for chat if there is none", None
    )
    apply_template: bool | None = about(
        "apply the chat template to prompt and completion rows, Alpaca rows, and preference pairs of plain texts: the "
        "prompt becomes the user's message, the completion the assistant's",
        "true if there is a chat template, except for preference pairs",
        None,
    )
    system: str | None = about(
        "system prompt of conversations that have no system message",
        "none: conversations stay as they are",
        None,
        min_length=1,
    )
    thinking: bool | None = about(
        "turn thinking on or off in the chat template: its variable enable_thinking or thinking",
        "the template's default",
        None,
    )
    ignored_fields: list[MessageField] = Field(
        default_factory=list,
        description="fields of messages that the chat template does not get, such as reasoning_content, or tools",
        json_schema_extra={"reason": "none: a field that the template does not write is an error"},
    )
    special_tokens: bool = about(
        "encode texts of special tokens in the data as special tokens",
        "false: a text cannot forge the end of a turn",
        False,
    )
    validation: float = about("share of the data held out for validation", "none", 0.0, ge=0, lt=1)
    validation_by: Literal["documents", "rows"] = about(
        "documents: held out by the hash of their content; rows: packed rows of `sequence` tokens, an exact share",
        "documents: no document is in both parts, whatever the sequence length",
        "documents",
    )
    bad_rows: float = about(
        "bad rows that may be skipped: a share if below 1, else a number", "0: the first one is an error", 0.0, ge=0
    )
    bad_files: int = about("damaged files that may be skipped", "0: the first one is an error", 0, ge=0)
    store: str | None = about(
        "folder of the tokenized documents, or its address in a bucket: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
        "~/.cache/forerun/tokens",
        None,
    )
    cache_gib: float | None = about(
        "largest size of the local cache of a store in a bucket, in GiB; 0: no cache",
        "a tenth of the free disk of ~/.cache/forerun",
        None,
        ge=0,
        le=1 << 20,
    )
    workers: int | None = about("number of processes that tokenize", "one per core", None, gt=0, le=1024)
    shuffle: Literal["rows", "blocks"] = about(
        "order of the rows in each epoch: rows permutes single rows; blocks permutes blocks of about 512 KiB, and "
        "mixes the rows of many blocks, so that a store in a bucket needs far fewer requests",
        "rows: the best mixing; a store on a local disk gains nothing from blocks",
        "rows",
    )
    prefetch: int = about(
        "batches that wait on the devices ahead of the step, and as many on the host",
        "2: hides the time to build a batch, and needs little memory",
        2,
        gt=0,
        le=1024,
    )
    feeders: int = about(
        "deprecated, without effect: a thread builds batches",
        "0: no warning",
        0,
        editors={"deprecated": True},
        ge=0,
        le=256,
    )
    ledger: bool = about("write the example ids of every step to ledger.jsonl", "off: it is one line per step", False)

    @field_validator("columns", mode="before")
    @classmethod
    def _known(cls, columns: Any) -> Any:
        return check_columns(columns)

    @model_validator(mode="after")
    def _one_place(self) -> Data:
        if not self.path and not self.mixture:
            raise JobValueError(
                "E-JOB-026",
                "data.path is missing",
                fix="set data.path to a file, a folder or a glob, or name several in data.mixture",
            )
        if self.path and self.mixture:
            raise JobValueError("E-JOB-027", "data.path and data.mixture are both given", fix="keep one of them")
        for key in ("columns", "separator", "limit"):
            if self.mixture and getattr(self, key):
                raise JobValueError(
                    "E-JOB-028", f"data.{key} is not possible with data.mixture", fix=f"write {key} into each part"
                )
        given = [part.weight is not None for part in self.mixture.values()]
        if any(given) and not all(given):
            raise JobValueError(
                "E-JOB-029", "data.mixture: some parts have no weight", fix="give every part a weight, or none of them"
            )
        return self

    @property
    def parts(self) -> dict[str, Part]:
        """The sources by name. A single source is called `data`."""
        if self.mixture:
            return self.mixture
        return {"data": Part(path=self.path or "", columns=self.columns, separator=self.separator, limit=self.limit)}

    @property
    def where(self) -> str:
        """The path, or the names of the mixture, for messages."""
        return self.path or f"mixture of {', '.join(self.mixture)}"
