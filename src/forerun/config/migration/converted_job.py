"""The result of converting a file of another trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config.schema import Job


@dataclass
class ConvertedJob:
    """A job that was made from a configuration of another trainer.

    Attributes:
      source: the trainer: axolotl, transformers, TRL or TRL (DPO).
      text: the job file, with comments.
      job: the same job, checked.
      not_converted: the keys that the job does not contain, each with the reason.
      unneeded: the keys that forerun does not need, each with the reason.
      assumed: what was assumed because the file does not say it.
    """

    source: str
    text: str = ""
    job: Job | None = None
    not_converted: dict[str, str] = field(default_factory=dict)
    unneeded: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
