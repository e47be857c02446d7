"""The chat format of a model: its template, the special tokens that the template uses, and the end of a turn.

A run stores a copy of the job's template in its folder, because the original file may change or disappear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.data.chat_template import TurnEnd, chat_prompts, job_template, thinking_variables, turn_end
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.hub.chat.template import MAX_TEMPLATE_BYTES, PROBE, chat_template, renders_alike
from forerun.hub.snapshot import Snapshot
from forerun.resolve.job_corpus import model_specials, model_template, own_tokenizer_files
from forerun.run_folder.run_folder import RunFolder
from forerun.weights_io import documents


@dataclass(frozen=True)
class ChatForm:
    """A chat template and what is needed to use it.

    Args:
      special: the texts of special tokens, by the names that templates use, and whether the job turns thinking on.
      end: the token or the text that ends a turn.
      origin: where the template comes from, for errors. None if it is in the model's own files.
    """

    template: str
    special: Mapping[str, Any]
    end: TurnEnd
    origin: str | None = None

    @property
    def texts(self) -> dict[str, str]:
        """The texts of special tokens."""
        return {name: value for name, value in self.special.items() if isinstance(value, str)}


def chat_form(
    run: RunFolder | None, job: Job | None, snapshot: Snapshot | None, tokenizer: Tokenizer
) -> ChatForm | None:
    """Return the chat format of a model, or None if it has no template.

    The template of the run has priority over that of the job's tokenizer, and that one over the model's files.

    Args:
      run: the run's folder, or None if the model is not a run.
      job: the run's job, or None if the model is not a run.
      snapshot: the files of the model or of its base, if there are any.
    """
    template, origin = (None, None) if run is None or job is None else _own_template(run, job)
    data = None if job is None else job.data
    template = model_template(data, snapshot) if template is None else template
    if template is None:
        return None
    thinking = None if job is None else job.data.thinking
    texts = model_specials(data, snapshot)
    special = texts | thinking_variables(thinking, template, texts, origin)
    return ChatForm(template, special, turn_end(template, special, tokenizer), origin)


def own_chat_form(run: RunFolder, job: Job, base: Snapshot | None, tokenizer: Tokenizer) -> ChatForm | None:
    """Return the chat format if the files of the run's tokenizer do not contain it, else None.

    They do not contain it if the job sets a template, or if its tokenizer has no template and the base has one.
    """
    own = own_tokenizer_files(job.data)
    if job.data.chat_template is None and (own is None or chat_template(own.folder) is not None):
        return None
    return chat_form(run, job, base, tokenizer)


def turn_ends(files: Snapshot, tokenizer: Tokenizer, generation: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer: the end of a turn of the template in `files`, and those in `generation`."""
    return end_ids(chat_form(None, None, files, tokenizer), tokenizer.eos, generation.get("eos_token_id"))


def exported_end(form: ChatForm, tokenizer: Tokenizer) -> str | None:
    """Return the eos_token of an exported tokenizer, or None to keep the tokenizer's own.

    It is the end of a turn, so that other programs stop there. The tokenizer keeps its own if the end of a turn is not
    a single token. It also keeps it if the template uses eos_token, because a change would alter the rendered text.
    """
    if form.end.token is None or form.end.token == tokenizer.eos or form.end.text is None:
        return None
    other = dict(form.special) | {"eos_token": form.end.text}
    return form.end.text if renders_alike(form.template, form.special, other) else None


def end_ids(form: ChatForm | None, *before: Any) -> list[int]:
    """Return the ids that end an answer, without duplicates: the end of a turn, then the ids in `before`.

    Each of `before` is an id, a list of ids, or None.
    """
    listed = [one for some in before for one in (some if isinstance(some, list) else [some])]
    own = [] if form is None or form.end.token is None else [form.end.token]
    return list(dict.fromkeys([*own, *(one for one in listed if isinstance(one, int))]))


def _own_template(run: RunFolder, job: Job) -> tuple[str | None, str | None]:
    """Return the template that the run's job sets and its origin, or two times None."""
    if job.data.chat_template is None:
        return None, None
    if run.chat_template.is_file():
        return read_regular(run.chat_template, MAX_TEMPLATE_BYTES).decode("utf-8"), str(run.chat_template)
    try:  # the copy was deleted, or the outline of a stage has none
        return job_template(job.data), f"data.chat_template: {job.data.chat_template}"
    except UserError as error:
        fix = f"put the template of the run at {run.chat_template}"
        raise UserError(error.code, error.what, why=error.why, fix=fix) from error


def write_chat(folder: Path, form: ChatForm, tokenizer: Tokenizer, generation: Mapping[str, Any]) -> None:
    """Write the template and the ids that end a turn to an export folder that contains the tokenizer.

    The files are read back. A conversation must get the same tokens from them as from `form` and `tokenizer`.

    Args:
      generation: the content of generation_config.json without the chat format.

    Raises:
      UserError: the tokens differ.
    """
    documents.write_chat_template(folder, form.template, form.texts, exported_end(form, tokenizer))
    ends = end_ids(form, generation.get("eos_token_id"), tokenizer.eos)
    documents.write_json(folder / "generation_config.json", {**generation, "eos_token_id": ends})
    back = Snapshot(str(folder), folder, None)
    other = checkpoint_tokenizer(back)
    found = chat_form(None, None, back, other)
    if found is not None:  # the files have no place for the choice of thinking
        found = replace(found, special={**form.special, **found.special})
    if found is None or found.end != form.end or _probed(found, other) != _probed(form, tokenizer):
        raise UserError(
            "E-RUN-010",
            "the export was not proven: a conversation gets other tokens than in training",
            why="the chat template and the tokenizer were read back and compared; the folder was removed",
            fix="export again; if it fails again, please report it with this text",
        )


def _probed(form: ChatForm, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of two example conversations."""
    return chat_prompts([PROBE[:1], [*PROBE, *PROBE[:1]]], form.template, form.special, tokenizer)
