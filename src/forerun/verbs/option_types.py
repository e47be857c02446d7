"""Types of the parameters of verbs. `Value` says how the command line reads a value and what its help calls it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from forerun.errors import UserError


@dataclass(frozen=True)
class Value:
    """How the command line reads a parameter. Its help text is the entry of the parameter in `Args:`.

    Attributes:
      metavar: the name of the value in the help, such as `FOLDER`.
      parse: returns the value of a text; raises ArgumentTypeError for a text that is none.
      help: the help text of a parameter that means the same in all commands, and needs no entry in `Args:`.
      option: the name of the option, if it is not that of the parameter: `no-cache` for `use_cache`.
      without_value: the value of the option if it is given without one.
      is_repeatable: whether each use of the option adds to the list, instead of replacing it.
      is_positional: whether a parameter with a default is an argument without an option name.
      group: options of one group exclude each other.
    """

    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    help: str = ""
    option: str = ""
    without_value: str | None = None
    is_repeatable: bool = False
    is_positional: bool = False
    group: str = ""


def comma_list(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def dollars(text: str) -> float:
    """Return an amount of dollars, with or without the sign."""
    return _positive(text.removeprefix("$"), f"{text!r} is not an amount of dollars such as 50")


def hours(text: str) -> float:
    """Return a number of hours, with or without the unit."""
    return _positive(text.removesuffix("h"), f"{text!r} is not a number of hours such as 12")


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def port_number(text: str) -> int:
    """Return the number of a TCP port."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def host_index(text: str) -> int:
    """Return the index of a host, from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the index of a host, from 0 on")
    return int(text)


def step_name(text: str) -> str:
    """Return newest, best or the number of a step."""
    if text not in ("newest", "best") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not newest, best or a number")
    return text


def mesh_sizes(text: str) -> tuple[int, int, int]:
    """Return the sizes of the axes data, fsdp and tp."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(
            "E-COMMAND-022",
            f"--mesh {text} is not a mesh",
            why="it is data x fsdp x tp, three numbers",
            fix="such as --mesh 1x4x2",
        )
    data, fsdp, tp = map(int, sizes)
    return data, fsdp, tp


def _positive(text: str, mistake: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(mistake)
    return value


Folder = Annotated[str | os.PathLike[str], Value("FOLDER")]
File = Annotated[str | os.PathLike[str], Value("FILE")]
Name = Annotated[str, Value("NAME")]
Count = Annotated[int, Value("N", count)]
Dollars = Annotated[float, Value("USD", dollars)]
Hours = Annotated[float, Value("H", hours)]
StepName = Annotated[str | int, Value("STEP", step_name)]
Zone = Annotated[str, Value("ZONE")]
Zones = Annotated[Sequence[str], Value("ZONES", comma_list)]
Providers = Annotated[str | Sequence[str], Value("NAMES", comma_list, is_repeatable=True)]
Slice = Annotated[str, Value("SLICE")]
Slices = Annotated[str | Sequence[str], Value("SLICES", comma_list)]
Texts = Annotated[Sequence[str], Value("TEXT", is_repeatable=True)]
JobFile = Annotated[str, Value("JOB", help="job file in YAML")]
Override = Annotated[str, Value("KEY=VALUE", help="change a value of the job, for example optimizer.lr=8e-5")]
Project = Annotated[str, Value("ID", help="Google Cloud project (default: that of your login)")]
