"""Tasks of lm-eval, by name or from YAML files, run on a model of ours."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import UserError, did_you_mean
from forerun.evaluate.language import Generate, Language
from forerun.evaluate.scoring import Progress, Scorer
from forerun.evaluate.table import results_table
from forerun.installation import install_command

BOOTSTRAP = 1000  # resamplings for the standard error of metrics that have no formula for it
TO_SHOW = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")


@dataclass(frozen=True)
class TaskResults:
    table: str
    values: dict[str, Any]  # as lm-eval gives them, without its samples


def require_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs lm-eval",
            why="it brings the tasks and their metrics, and is not installed",
            fix=install_command("eval"),
        )


def run_tasks(
    names: Sequence[str],
    scorer: Scorer,
    language: Language,
    generate: Generate,
    *,
    limit: int | None = None,
    chat: bool = False,
    progress: Progress | None = None,
) -> TaskResults:
    """`names` are tasks, groups or tags of lm-eval, YAML files, or folders of them; `limit` examples of each."""
    require_harness()
    with _quiet_harness():
        import lm_eval

        from forerun.evaluate.harness import HarnessModel

        manager, found = _tasks(names)
        results = lm_eval.simple_evaluate(
            model=HarnessModel(scorer, language, generate, progress),
            tasks=found,
            task_manager=manager,
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    return TaskResults(results_table(results), {key: results[key] for key in TO_SHOW if key in results})


def _tasks(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """lm-eval's own tasks are looked through only if one of them is named: there are thousands."""
    from lm_eval.tasks import TaskManager

    folders = [Path(name) for name in names if Path(name).is_dir()]
    files = [Path(name) for name in names if _is_yaml(name)]
    own = TaskManager(include_defaults=False, include_path=[str(folder) for folder in folders]).all_tasks
    if folders and not own:
        raise UserError(
            f"{folders[0]} holds no task", why="no YAML file in it says `task: NAME`", fix="see docs/eval.md"
        )
    plain = [name for name in names if Path(name) not in (*folders, *files)]
    manager = TaskManager(include_defaults=bool(plain), include_path=[str(folder) for folder in folders] or None)
    for name in plain:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise UserError(
                f"unknown task '{name}'",
                why="lm-eval has none of this name, and it is no YAML file and no folder",
                fix=f"did you mean '{near}'?" if near else "see all names: lm-eval ls tasks",
            )
    loaded: list[Any] = []
    for name in (*plain, *map(str, files), *own):
        try:
            built = manager.load([name])
        except Exception as error:  # of a dozen libraries, for want of a file, a network or a right word
            text = str(error).strip() or type(error).__name__
            raise UserError(
                f"task '{name}' cannot be loaded",
                why=text.splitlines()[0],
                fix="its data must be in the cache, on the network or in a local file: see docs/eval.md",
            ) from error
        _require_harmless(built["tasks"])
        top = built["groups"] or built["tasks"]
        loaded += [item for item in top.values() if not _is_inner(item, built)]
    return manager, loaded


def _require_harmless(tasks: dict[str, Any]) -> None:
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                f"task '{name}' runs the model's answers as code",
                why="what a model writes is not safe to run on this machine",
                fix="choose another task; or export the model and run lm-eval yourself in a sandbox",
            )


def _is_inner(item: Any, built: Any) -> bool:
    """Whether another group of the same answer holds it already."""
    return any(getattr(item, "name", None) in children for children in (built["group_map"] or {}).values())


def _is_yaml(name: str) -> bool:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return False
    if not path.is_file():
        raise UserError(f"--tasks: {name} does not exist", why=f"looked for {path.absolute()}", fix="mend the path")
    return True


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Standard output stays ours; no process is forked beside the threads of the devices."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
