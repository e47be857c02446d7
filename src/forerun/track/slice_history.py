"""How many slices computed the steps of a run, from the lines of events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def slice_history(events: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return from which step on how many slices computed the steps that the run keeps.

    The `step` of an entry is that of the checkpoint from which they continued, 0 for the start. Steps that a later
    session computed again count for that session. A session without a `resume` line did not get as far as its state,
    except for the first one, which has none. The result is empty for a run that does not count slices.
    """
    found: list[dict[str, int]] = []
    slices: Any = None
    for event in events:
        if event.get("event") == "start":
            slices = event.get("slices")
        first = event.get("event") == "start" and event.get("session") == 1
        if not (first or event.get("event") == "resume") or type(slices) is not int:
            continue
        step = 0 if first else int(event.get("step", 0))
        while found and found[-1]["step"] >= step:
            found.pop()
        if not found or found[-1]["slices"] != slices:
            found.append({"step": step, "slices": slices})
    return found
