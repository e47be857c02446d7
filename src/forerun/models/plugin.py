"""Classes of the user's own, named `module.path:Class` in the job file: found, made and held to what they must have."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from forerun.errors import UserError


@dataclass(frozen=True)
class Plugin:
    """What kind of class it is, and how mistakes in it are told."""

    kind: str  # model, objective
    options: str  # the job's key for its arguments
    added: str  # which arguments are not the user's
    needs: tuple[str, ...]
    protocol: str  # where what it needs is written down


def made_by(name: str, arguments: dict[str, Any], plugin: Plugin) -> Any:
    """The class of that name, called with the arguments."""
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)(**arguments)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{plugin.kind} {name!r}: module {error.name!r} was not found",
            why="modules are looked for beside the job file and among installed packages",
            fix=f"put {module_name}.py beside the job file, or install its package",
        ) from error
    except AttributeError as error:
        raise UserError(
            f"{plugin.kind} {name!r}: {error}",
            why="the part behind the colon is a class of that module",
            fix="mend the name",
        ) from error
    except TypeError as error:
        raise UserError(
            f"{plugin.kind} {name!r} does not take these options",
            why=str(error),
            fix=f"{plugin.options} are the arguments of the class; {plugin.added}",
        ) from error
    lacks = [part for part in plugin.needs if not hasattr(made, part)]
    if lacks:
        raise UserError(
            f"{plugin.kind} {name!r} lacks {', '.join(lacks)}",
            why=f"what a class of your own must have is listed in {plugin.protocol}",
            fix="see docs/own.md, with an example",
        )
    return made
