"""Custom objectives: instances of the class that the job's objective section names."""

from __future__ import annotations

from forerun.config.training_method import CustomObjective
from forerun.errors import UserError
from forerun.models.plugin import Plugin, create_plugin
from forerun.objectives.base import Objective, Plain

# Methods that a custom objective must not override: the state and the batches of a run must not depend on a class that
# may be missing later.
FIXED = ("specs", "start", "own", "extras")
PLUGIN = Plugin(
    "objective",
    "objective.options",
    "chunk is added by forerun",
    needs=("__call__", "unit", "flops_per_token", *FIXED),
    protocol="forerun.objectives.base.Objective",
)


def custom_objective(section: CustomObjective, chunk: int) -> Objective:
    """Return an instance of the class that the job names as `module.path:Class`.

    Args:
      section: the objective section of the job.
      chunk: number of positions whose logits exist at one time. It is passed to the class, with the job's options.

    Raises:
      UserError: the class cannot be used, or it overrides one of the FIXED methods of `Plain`.
    """
    objective: Objective = create_plugin(section.name, {"chunk": chunk, **section.options}, PLUGIN)
    changed = [name for name in FIXED if getattr(type(objective), name, None) is not getattr(Plain, name)]
    if changed:
        raise UserError(
            "E-METHOD-004",
            f"objective {section.name!r}: its {changed[0]} is not that of Plain",
            why="a custom objective uses only the model's parameters and the five arrays of a batch",
            fix="derive it from forerun.objectives.base.Plain; define __call__, and optionally unit, flops_per_token",
        )
    return objective
