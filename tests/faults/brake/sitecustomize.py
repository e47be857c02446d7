"""Holds a run back where a test wants to find it: whoever acts in the midst of a run must not race it to its end.

Processes that have this folder on PYTHONPATH look for the file FORERUN_TEST_BRAKE while they train. It is JSON: steps
from `first` to `last` begin `step_seconds` late, their checkpoints are committed `commit_seconds` late, their batches
are built `data_seconds` late, and nothing is begun at all for `begin_seconds`. Each save is measured `saved_seconds`
longer than it was. Without the file they are as they would be.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FILE = os.environ.get("FORERUN_TEST_BRAKE", "")


def hold(step: int | None, what: str) -> None:
    """As long as the file says, or until it is gone."""
    try:
        with open(FILE, encoding="utf-8") as file:
            said = json.load(file)
    except FileNotFoundError:
        return
    if step is None or said["first"] <= step <= said["last"]:
        until = time.monotonic() + said.get(what, 0.0)
        while time.monotonic() < until and os.path.exists(FILE):
            time.sleep(0.01)


def brake_steps(module: ModuleType) -> None:
    begin, dispatch = module.StepPipeline.__init__, module.StepPipeline.dispatch

    def held_begin(self: Any, *given: Any) -> None:
        hold(None, "begin_seconds")
        begin(self, *given)

    def held_dispatch(self: Any, step: int, batch: Any) -> None:
        hold(step, "step_seconds")
        dispatch(self, step, batch)

    module.StepPipeline.__init__, module.StepPipeline.dispatch = held_begin, held_dispatch


def brake_commits(module: ModuleType) -> None:
    commit = module.Log.commit

    def held(self: Any, record: Any) -> Any:
        hold(record.step, "commit_seconds")
        return commit(self, record)

    module.Log.commit = held


def lengthen_saves(module: ModuleType) -> None:
    """Add `saved_seconds` where the measured time of a save is read, so that no caller ever sees the real time."""

    def measured(self: Any) -> float | None:
        seconds: float | None = vars(self)["save_seconds"]
        try:
            with open(FILE, encoding="utf-8") as file:
                longer = json.load(file).get("saved_seconds", 0.0)
        except FileNotFoundError:
            longer = 0.0
        return None if seconds is None else seconds + longer

    def measure(self: Any, seconds: float | None) -> None:
        vars(self)["save_seconds"] = seconds

    module.CheckpointStore.save_seconds = property(measured, measure)


def brake_data(module: ModuleType) -> None:
    build = module.Batches.batch_at

    def held(self: Any, step: int) -> Any:
        hold(step + 1, "data_seconds")
        return build(self, step)

    module.Batches.batch_at = held


class Braked(MetaPathFinder):
    """Changes the modules as they are imported, and imports none itself."""

    changes = {  # noqa: RUF012
        "forerun.run.steps": brake_steps,
        "forerun.checkpoint.log": brake_commits,
        "forerun.checkpoint.store": lengthen_saves,
        "forerun.data.order.batches": brake_data,
    }

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self.changes.pop(name, None)
        spec = find_spec(name) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        run = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


if FILE:
    sys.meta_path.insert(0, Braked())
