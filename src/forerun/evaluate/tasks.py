"""Runs tasks of lm-eval, given by name or as YAML files, on a model of forerun."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import UserError, did_you_mean, first_line
from forerun.evaluate.scoring import Generate, Language, Scorer
from forerun.installation import install_command
from forerun.reporter import SILENT, Reporter

HEADERS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
BOOTSTRAP = 1000  # bootstrap samples for the standard error of metrics without a formula for it
TO_SHOW = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")


@dataclass(frozen=True)
class TaskResults:
    """The results of tasks, as a table and as values."""

    table: str
    values: dict[str, Any]  # results of lm-eval, without its samples


def require_lm_eval() -> None:
    """Raise a UserError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "E-EVAL-010",
            "--tasks needs lm-eval",
            why="this package, which has the tasks and their metrics, is not installed",
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
    reporter: Reporter = SILENT,
) -> TaskResults:
    """Run tasks of lm-eval, and return their results.

    Args:
        names: Tasks, groups or tags of lm-eval, YAML files, or folders of YAML files.
        scorer: The model, for log-probabilities.
        language: The tokenizer.
        generate: The function that generates answers.
        limit: The number of examples of each task, or None for all.
        chat: Whether to apply the chat template.
        reporter: Shows the number of finished requests.

    Raises:
        UserError: lm-eval is not installed, or a task is unknown, cannot be loaded, or runs code of the model.
    """
    require_lm_eval()
    with _quiet_harness():
        import lm_eval

        from forerun.evaluate.harness import HarnessModel

        manager, found = _tasks(names)
        results = lm_eval.simple_evaluate(
            model=HarnessModel(scorer, language, generate, reporter),
            tasks=found,
            task_manager=manager,
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    return TaskResults(results_table(results), {key: results[key] for key in TO_SHOW if key in results})


def _tasks(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return the task manager and the loaded tasks.

    The built-in tasks of lm-eval are indexed only if one of them is named, because there are thousands.
    """
    from lm_eval.tasks import TaskManager

    folders = [Path(name) for name in names if Path(name).is_dir()]
    files = [Path(name) for name in names if _is_yaml(name)]
    own = TaskManager(include_defaults=False, include_path=[str(folder) for folder in folders]).all_tasks
    if folders and not own:
        raise UserError(
            "E-EVAL-011",
            f"{folders[0]} contains no task",
            why="no YAML file in it has a line `task: NAME`",
            fix="see docs/how-to/eval.md",
        )
    plain = [name for name in names if Path(name) not in (*folders, *files)]
    manager = TaskManager(include_defaults=bool(plain), include_path=[str(folder) for folder in folders] or None)
    for name in plain:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise UserError(
                "E-EVAL-012",
                f"unknown task '{name}'",
                why="lm-eval has no task of this name, and it is not a YAML file or a folder",
                fix=f"did you mean '{near}'?" if near else "see all names: lm-eval ls tasks",
            )
    loaded: list[Any] = []
    for name in (*plain, *map(str, files), *own):
        try:
            built = manager.load([name])
        except Exception as error:  # many libraries can fail here: files, network, YAML
            raise UserError(
                "E-EVAL-013",
                f"task '{name}' cannot be loaded",
                why=first_line(error),
                fix="its data must be in the cache, on the network or in a local file: see docs/how-to/eval.md",
            ) from error
        _require_harmless(built["tasks"])
        top = built["groups"] or built["tasks"]
        loaded += [item for item in top.values() if not _is_inner(item, built)]
    return manager, loaded


def _require_harmless(tasks: dict[str, Any]) -> None:
    """Raise a UserError for a task that runs the answers of the model as code."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                "E-EVAL-014",
                f"task '{name}' runs the model's answers as code",
                why="code that a model writes is not safe to run on this machine",
                fix="choose another task; or export the model and run lm-eval yourself in a sandbox",
            )


def _is_inner(item: Any, built: Any) -> bool:
    """Return whether another group that was loaded with it already contains it."""
    return any(getattr(item, "name", None) in children for children in (built["group_map"] or {}).values())


def _is_yaml(name: str) -> bool:
    """Return whether the name is a YAML file. Raise a UserError if that file does not exist."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return False
    if not path.is_file():
        raise UserError(
            "E-EVAL-015", f"--tasks: {name} does not exist", why=f"looked for {path.absolute()}", fix="correct the path"
        )
    return True


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Redirect the output of lm-eval to stderr, hide its log, and keep it from forking beside the device threads."""
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


def results_table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line per metric, as lm-eval prints it. Tasks of a group are below it, indented.

    The printer of lm-eval is not used: it may fork a process, which is not safe with the threads of the devices.
    """
    lines: list[tuple[str, ...]] = []
    for name, depth in _order(results):
        lines += _metric_lines(results, name, depth)
    widths = [max(len(line[n]) for line in (HEADERS, *lines)) for n in range(len(HEADERS))]
    rule = "|".join("-" * width for width in widths)
    shown = [
        "|".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (HEADERS, *lines)
    ]
    return "\n".join(f"|{line}|" for line in (shown[0], rule, *shown[1:]))


def _metric_lines(results: Mapping[str, Any], name: str, depth: int) -> list[tuple[str, ...]]:
    found = results["results"].get(name) or results.get("groups", {}).get(name, {})
    title = f"{' ' * depth}- {found.get('alias', name)}" if depth else str(found.get("alias", name))
    first = (title, str(results.get("versions", {}).get(name, "")))
    shots = str(results.get("n-shot", {}).get(name, ""))
    lines: list[tuple[str, ...]] = []
    for key, value in sorted(found.items()):
        metric, _, chosen = key.partition(",")
        if key in NOT_METRICS or metric.endswith("_stderr"):
            continue
        error = found.get(f"{metric}_stderr,{chosen}", "N/A")
        arrow = {True: "↑", False: "↓"}.get(results.get("higher_is_better", {}).get(name, {}).get(metric), "")
        lines.append((*first, chosen, shots, metric, arrow, _figure(value), "±", _figure(error)))
        first = ("", "")
    return lines or [(*first, "", shots, "", "", "", "", "")]


def _order(results: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the name and depth of each group and task, with each group before its members."""
    inside: Mapping[str, list[str]] = results.get("group_subtasks", {})
    known = {*results["results"], *results.get("groups", {})}
    order: list[tuple[str, int]] = []

    def add(name: str, depth: int) -> None:
        if name in known and name not in {seen for seen, _ in order}:
            order.append((name, depth))
            for child in inside.get(name, ()):
                add(child, depth + 1)

    inner = {child for children in inside.values() for child in children}
    for name in (*inside, *results["results"]):
        if name not in inner:
            add(name, 0)
    return order


def _figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
