"""YAML documents for people: keys in the given order, and texts of several lines as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class BlockDumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


BlockDumper.add_representer(str, _text)


def documents(*contents: Mapping[str, Any]) -> str:
    """Return the documents of a YAML file."""
    return yaml.dump_all(contents, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=120)
