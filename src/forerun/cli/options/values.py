"""Types of option values. A wrong value is a mistake of the user."""

from __future__ import annotations

import argparse


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


def step_name(text: str) -> str:
    """Return newest, best or the number of a step."""
    if text not in ("newest", "best") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not newest, best or a number")
    return text


def _positive(text: str, mistake: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(mistake)
    return value
