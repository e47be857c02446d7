"""From the job's objective section to an objective: a class of the user's own."""

from __future__ import annotations

from forerun.config.objective import OwnObjective
from forerun.errors import UserError
from forerun.models.plugin import Plugin, made_by
from forerun.objectives.base import Objective, Plain

FIXED = ("specs", "start", "own", "extras")  # what a run holds and feeds does not depend on a class that may be away
PLUGIN = Plugin(
    "objective",
    "objective.options",
    "chunk is added by forerun",
    needs=("__call__", "unit", "flops_per_token", *FIXED),
    protocol="forerun.objectives.base.Objective",
)


def own_objective(section: OwnObjective, chunk: int) -> Objective:
    """`module.path:Class`, called with the chunk of positions whose logits exist at one time and the job's options."""
    made: Objective = made_by(section.name, {"chunk": chunk, **section.options}, PLUGIN)
    changed = [name for name in FIXED if getattr(type(made), name, None) is not getattr(Plain, name)]
    if changed:
        raise UserError(
            f"objective {section.name!r}: its {changed[0]} is not that of Plain",
            why="an objective of your own reads the model's parameters and the five arrays of a batch, no more",
            fix="class YourOwn(forerun.objectives.base.Plain), with __call__ and perhaps unit and flops_per_token",
        )
    return made
