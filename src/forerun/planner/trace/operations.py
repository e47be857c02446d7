"""What a trace says about one operation: its category, its place in the model, its work and its source line."""

from __future__ import annotations

import re
from typing import Any

from forerun.planner.hlo import Module
from forerun.planner.time.activity import Activity

FUSIONS = {"kLoop": "loop fusion", "kOutput": "output fusion", "kInput": "input fusion", "kCustom": "custom fusion"}
LONGEST_SHAPE = 200


def category_of(activity: Activity) -> str:
    """Return the category of an operation, in the words of the XLA profiler."""
    x = activity.instruction
    if x.op == "fusion":
        if activity.flops:
            return "convolution fusion"
        found = re.search(r"\bkind=(\w+)", x.attributes)
        return FUSIONS.get(found[1] if found else "", "fusion")
    return x.op


def arguments_of(module: Module, activity: Activity, *, is_transfer: bool) -> dict[str, Any]:
    """Return the arguments of an operation's event. Names are those of the XLA profiler where it has one."""
    x = activity.instruction
    source = module.source(x)
    return {
        "tf_op": x.op_name(),
        "source": f"{_short(source[0])}:{source[1]}" if source else "",
        "flops": round(activity.flops) or None,
        "transferred_bytes" if is_transfer else "bytes_accessed": round(activity.size_bytes) or None,
        "shape": x.shape_text.strip()[:LONGEST_SHAPE],
        "trips": activity.trips if activity.called and activity.trips > 1 else None,
    }


def _short(path: str) -> str:
    """Return a path without the folders of this machine: from `forerun/` on, or the name of the file."""
    _, package, rest = path.rpartition("/forerun/")
    return f"forerun/{rest}" if package else path.rpartition("/")[2]
