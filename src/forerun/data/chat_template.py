"""The chat template that a job names: its text, and how errors refer to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.config import schema
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.hub.chat.render_process import SWITCHES
from forerun.hub.chat.template import CHATML, MAX_TEMPLATE_BYTES, thinking_switch

BUILT_IN = {"chatml": CHATML}


def job_template(data: schema.Data) -> str | None:
    """Return the text of `data.chat_template`; None if the job does not name one."""
    return None if data.chat_template is None else template_named(data.chat_template, "data.chat_template")


def template_named(name: str, key: str) -> str:
    """Return the text of a built-in template or of a Jinja file. `key` is what errors call the setting."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        return read_regular(name, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "E-DATA-002",
            f"{key}: {name} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            fix="name a Jinja file, or chatml",
        ) from error


def template_origin(data: schema.Data) -> str | None:
    """Return what errors call the job's template; None for the model's own."""
    return None if data.chat_template is None else f"data.chat_template: {data.chat_template}"


def thinking_variables(
    thinking: bool | None, template: str, special: Mapping[str, Any], origin: str | None = None
) -> dict[str, bool]:
    """Return the variable of the template that turns thinking on or off; empty for its default.

    Args:
      thinking: `data.thinking` of the job.
      template: the text of the chat template.
      special: the texts of special tokens that the template uses.
      origin: what errors call the template; None for the model's own.

    Raises:
      UserError: the template has no such variable.
    """
    if thinking is None:
        return {}
    found = thinking_switch(template, special, origin)
    if found is None:
        effort = "; its reasoning_effort has no value for off" if "reasoning_effort" in template else ""
        raise UserError(
            "E-DATA-165",
            f"data.thinking={str(thinking).lower()}: the chat template has no switch for thinking",
            why=f"its generation prompt depends neither on {' nor on '.join(SWITCHES)}{effort}",
            fix="remove data.thinking, or name a template with such a switch: data.chat_template=FILE",
        )
    return {found: thinking}
