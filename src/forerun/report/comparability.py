"""Reasons why the losses of two jobs cannot be compared: other objectives, other tokens, or other validation data."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forerun.config.schema import Job
from forerun.report.job_differences import differing_keys

# The objective, with all of its settings: a DPO loss with another beta is another quantity.
_OBJECTIVE = re.compile(r"(objective|preferences|distil)(\.(?!cache$|where$).*)?|experts\.(balance|z)_loss")
_TOKENS = re.compile(r"data\.tokenizer")
# What the text of a source is, and which of its tokens have loss.
_TEXT = re.compile(
    r"data\.(mixture\.[^.]+\.)?(path|columns|separator|limit)(\..*)?"
    r"|data\.(loss_on|chat_template|apply_template|system|thinking|special_tokens|ignored_fields)"
)
_HELD_OUT = re.compile(r"data\.(validation|validation_by)")
_WEIGHTS = re.compile(r"data\.mixture\.[^.]+\.weight")


def incomparable_keys(jobs: Sequence[Job], *, validation: bool) -> list[tuple[str, list[str]]]:
    """Return (reason, the keys that differ) for each reason why the losses of the jobs cannot be ranked.

    Args:
      jobs: the jobs.
      validation: whether validation losses are compared, not losses of training. They depend on what is held out.
    """
    keys = [key for key, _ in differing_keys(jobs)]
    data = [_TEXT, _HELD_OUT if validation else _WEIGHTS]
    reasons = (
        ("the objectives differ", [_OBJECTIVE]),
        ("the tokenizers differ", [_TOKENS]),
        (f"the {'validation' if validation else 'training'} data differs", data),
    )
    matches = [
        (reason, [key for key in keys if any(pattern.fullmatch(key) for pattern in patterns)])
        for reason, patterns in reasons
    ]
    return [(reason, differing) for reason, differing in matches if differing]
