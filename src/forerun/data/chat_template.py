"""The chat template that a job names: its text, and how errors refer to it."""

from __future__ import annotations

from forerun.config import schema
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.hub.chat.template import CHATML, MAX_TEMPLATE_BYTES

BUILT_IN = {"chatml": CHATML}


def job_template(data: schema.Data) -> str | None:
    """Return the text of `data.chat_template`; None if the job does not name one."""
    name = data.chat_template
    if name is None or name in BUILT_IN:
        return BUILT_IN.get(name or "")
    try:
        return read_regular(name, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "E-DATA-002",
            f"data.chat_template: {name} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            fix="name a Jinja file, or data.chat_template=chatml",
        ) from error


def template_origin(data: schema.Data) -> str | None:
    """Return what errors call the job's template; None for the model's own."""
    return None if data.chat_template is None else f"data.chat_template: {data.chat_template}"
