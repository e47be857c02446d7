"""`forerun explain`: what an error code means, an example, and the fix, without a network."""

from __future__ import annotations

import argparse
import re

from forerun.api.machine import explain
from forerun.error_codes import entries


def run(args: argparse.Namespace) -> int:
    """Print the entry of a code, or all codes with their titles."""
    if args.code is None:
        for entry in entries().values():
            print(f"{entry.code:<18}{entry.title}")
        return 0
    entry = explain(args.code)
    print(f"{entry.code}: {entry.title}\n\n{plain(entry.text)}")
    return 0


def plain(markdown: str) -> str:
    """Return an entry without its Markdown: examples are indented, and the label of the fix has a colon."""
    # split() with a group returns text and examples in turn. Examples keep their backquotes: they show real output.
    parts = re.split(r"^```text\n(.*?)\n```$", markdown, flags=re.M | re.S)
    text = [part.replace("**Fix.**", "Fix:").replace("`", "") for part in parts[::2]]
    examples = [re.sub(r"^(?=.)", "  ", part, flags=re.M) for part in parts[1::2]]
    return "".join(piece for pair in zip(text, [*examples, ""], strict=True) for piece in pair)
