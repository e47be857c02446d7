"""How a run's model chats: its template, the texts of special tokens that the template uses, and the end of a turn.

A run keeps the template of its job in its own folder, because the job's file may change or disappear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.data.chat_template import job_template
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer
from forerun.data.turns import TurnEnd, chat_prompts, turn_end
from forerun.errors import UserError
from forerun.exchange import documents
from forerun.files import read_regular
from forerun.hub.chat import MAX_TEMPLATE_BYTES, chat_template
from forerun.hub.snapshot import Snapshot
from forerun.hub.turns import PROBE, renders_alike
from forerun.loop.corpus import special_texts
from forerun.loop.folder import RunFolder


@dataclass(frozen=True)
class ChatForm:
    """A chat template with what it needs; `origin` is where it comes from, None for the model's own files."""

    template: str
    special: Mapping[str, str]
    end: TurnEnd
    origin: str | None = None


def chat_form(
    run: RunFolder | None, job: Job | None, snapshot: Snapshot | None, tokenizer: Tokenizer
) -> ChatForm | None:
    """Return how a model chats: by the run's own template, else by that of its base or folder; None without any."""
    template, origin = (None, None) if run is None or job is None else _own_template(run, job)
    if template is None and snapshot is not None:
        template = chat_template(snapshot.folder)
    if template is None:
        return None
    special = special_texts(snapshot)
    return ChatForm(template, special, turn_end(template, special, tokenizer), origin)


def own_chat_form(run: RunFolder, job: Job, base: Snapshot | None, tokenizer: Tokenizer) -> ChatForm | None:
    """Return the form that a run's job gives its model; None if the model chats as its base does, or not at all."""
    found = chat_form(run, job, base, tokenizer) if job.data.chat_template is not None else None
    return found if found is not None and found.origin is not None else None


def exported_end(form: ChatForm, tokenizer: Tokenizer) -> str | None:
    """Return the text that an exported tokenizer calls eos_token; None if it keeps its own.

    It is the end of a turn, so that other programs stop there. It stays as it was if the end of a turn is no single
    token, or if the template itself writes eos_token: its text would become another one.
    """
    if form.end.token is None or form.end.token == tokenizer.eos or form.end.text is None:
        return None
    other = dict(form.special) | {"eos_token": form.end.text}
    return form.end.text if renders_alike(form.template, form.special, other) else None


def end_ids(form: ChatForm | None, *before: Any) -> list[int]:
    """Return the ids that end an answer: the end of a turn first, then the ids that ended a text before."""
    listed = [one for some in before for one in (some if isinstance(some, list) else [some])]
    own = [] if form is None or form.end.token is None else [form.end.token]
    return list(dict.fromkeys([*own, *(one for one in listed if isinstance(one, int))]))


def _own_template(run: RunFolder, job: Job) -> tuple[str | None, str | None]:
    if job.data.chat_template is None:
        return None, None
    if run.chat_template.is_file():
        return read_regular(run.chat_template, MAX_TEMPLATE_BYTES).decode("utf-8"), str(run.chat_template)
    try:  # a run of an earlier version
        return job_template(job.data), f"data.chat_template: {job.data.chat_template}"
    except UserError as error:
        fix = f"put the template of the run at {run.chat_template}"
        raise UserError(error.what, why=error.why, fix=fix) from error


def write_chat(folder: Path, form: ChatForm, tokenizer: Tokenizer, generation: Mapping[str, Any]) -> None:
    """Write the template and the ends of a turn beside the tokenizer files that `folder` has; read them back.

    `generation` is what generation_config.json says without the chat.
    """
    documents.write_chat_template(folder, form.template, form.special, exported_end(form, tokenizer))
    ends = end_ids(form, generation.get("eos_token_id"), tokenizer.eos)
    documents.write_json(folder / "generation_config.json", {**generation, "eos_token_id": ends})
    back = Snapshot(str(folder), folder, None)
    other = checkpoint_tokenizer(back)
    found = chat_form(None, None, back, other)
    if found is None or found.end != form.end or _probed(found, other) != _probed(form, tokenizer):
        raise UserError(
            "the export was not proven: a conversation gets other tokens than in training",
            why="the chat template and the tokenizer were read back and compared; the folder was removed",
            fix="export again; if it fails again, please report it with this text",
        )


def _probed(form: ChatForm, tokenizer: Tokenizer) -> list[list[int]]:
    return chat_prompts([PROBE[:1], [*PROBE, *PROBE[:1]]], form.template, form.special, tokenizer)
