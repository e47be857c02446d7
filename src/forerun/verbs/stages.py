"""`load_stages`: a job file with stages, as ordinary jobs that are planned and trained one after the other."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.config.schema import Job
from forerun.config.stages import Stage, stage_named
from forerun.errors import UserError
from forerun.planner.report.stage_totals import StageTotal, over_stages_budget, print_totals, totals_of
from forerun.reporter import LineReporter, Reporter
from forerun.verbs.job_files import open_stages

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.verbs.check.check import JobReport
    from forerun.verbs.plan import Plan
    from forerun.verbs.train import Run


class Stages(Mapping[str, Job]):
    """The stages of a job file: a mapping from their names to ordinary jobs, in the order of the file.

    The job of a later stage names the folder that the stage before writes. Until it exists, use `planned_job`, `plan`
    and `check` of this class instead of the functions for a single job.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    def __getitem__(self, name: str) -> Job:
        for stage in self._stages:
            if stage.name == name:
                return stage.job
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([stage.name for stage in self._stages])

    def __len__(self) -> int:
        return len(self._stages)

    def __repr__(self) -> str:
        return "\n".join(f"{stage.name}: {stage.job.name}, {stage.start_text}" for stage in self._stages)

    def planned_job(self, name: str) -> Job:
        """Return the job of a stage for functions that read no weights, such as `forerun.plan` and `inspect_data`.

        If the stage before was not trained yet, the job names a model folder without weights in forerun's cache.
        """
        from forerun.verbs.stage_result import planning_job

        return planning_job(stage_named(self._stages, name))

    def check(self, name: str, *, on: str | None = None) -> JobReport:
        """Check the job of a stage. See `forerun.check`."""
        report = check_stage(stage_named(self._stages, name), on)
        if report.error is not None:
            raise report.error
        return report

    def plan(self, *, max_usd: float | None = None, **options: Any) -> StagesPlan:
        """Plan all stages without their weights. See `forerun.plan` for the options.

        Args:
          max_usd: the budget of all stages together. `StagesPlan.require_fit` raises if they cost more.
          **options: other options of `forerun.plan`.
        """
        return plan_stages(self._stages, max_usd=max_usd, **options)

    def train(
        self,
        stage: str | None = None,
        *,
        fresh: bool = False,
        take_over: bool = False,
        reporter: Reporter | None = None,
    ) -> dict[str, Run]:
        """Train the stages in their order. Finished stages are skipped, and an interrupted stage is resumed.

        Args:
          stage: train only this stage; the stage before must be finished.
          fresh: start over. The earlier runs of this stage and of all later ones are renamed.
          take_over: train a run that another live process trains. The next save of that process fails.
          reporter: receives the progress; default: a display that fits the notebook or the terminal.

        Returns:
          The runs of the stages that are finished or were trained, by name. The last one is not finished if it was
          asked to stop.

        Raises:
          UserError: A job has a mistake, or a finished stage was changed.
        """
        from forerun.run_folder.open_folder import require_run_in_place
        from forerun.run_folder.run_folder import folder_of
        from forerun.verbs.train import open_run, train_in_place

        chosen = self._stages if stage is None else (stage_named(self._stages, stage),)
        for one in () if fresh else chosen:
            require_run_in_place(one.job)
        begin_stages(self._stages, chosen[0], fresh=fresh, take_over=take_over)
        runs: dict[str, Run] = {}
        for one in chosen:
            job = ready_to_train(self._stages, one, LineReporter(sys.stdout))
            if job is None:
                runs[one.name] = open_run(folder_of(one.job).path)
                continue
            runs[one.name] = train_in_place(job, take_over=take_over, reporter=reporter)
            if not runs[one.name].finished:
                break
        return runs


def load_stages(path: str | os.PathLike[str], *overrides: str) -> Stages:
    """Load a job file with stages, and apply overrides, from left to right.

    Args:
      path: the job file, in YAML.
      *overrides: changes of all stages, such as `"batch=8"`, or of one stage, such as `"stages.qat.steps=100"`.

    Raises:
      UserError: The file cannot be read, has mistakes, or has no stages.
    """
    stages = open_stages(path, overrides)
    if not stages:
        raise UserError(
            "E-JOB-118",
            f"{os.fspath(path)} has no stages",
            why="it describes one job",
            fix="use forerun.load_job, or add a section stages",
        )
    return Stages(stages)


@dataclass(frozen=True)
class StagesPlan:
    """The plans of all stages of a file.

    Attributes:
      plans: the plan of each stage by its name.
      max_usd: the budget of all stages together, or None.
    """

    plans: Mapping[str, Plan]
    max_usd: float | None = None

    @property
    def fits(self) -> bool:
        """Whether each stage fits at least one slice."""
        return all(plan.fits for plan in self.plans.values())

    @property
    def totals(self) -> list[StageTotal]:
        """The sums of all stages for each slice that all plans contain, cheapest first."""
        return totals_of(self._rows)

    @property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        return {name: plan.rows for name, plan in self.plans.items()}

    def require_fit(self) -> StagesPlan:
        """Return the plan, or raise if a stage fits no slice, or if all stages together cost more than the budget."""
        for name, plan in self.plans.items():
            try:
                plan.require_fit()
            except UserError as error:
                raise UserError(error.code, f"stage {name}: {error.what}", why=error.why, fix=error.fix) from None
        if self.max_usd is not None and (found := over_stages_budget(self._rows, self.max_usd)) is not None:
            raise found
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the plans and the totals as `forerun plan --json` prints them."""
        stages = {name: plan.to_dict() for name, plan in self.plans.items()}
        return {"stages": stages, "totals": [total.as_dict() for total in self.totals]}

    def print(self, console: Console) -> None:
        """Print the table of each stage, then the totals."""
        for plan in self.plans.values():
            plan.print(console)
            console.print()
        print_totals(console, self._rows, self.max_usd)

    def __repr__(self) -> str:
        from forerun.console import SafeConsole
        from forerun.verbs.plan import PIPED_COLUMNS

        stream = io.StringIO()
        self.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
        return stream.getvalue().rstrip("\n")


def plan_stages(stages: Sequence[Stage], *, max_usd: float | None = None, **options: Any) -> StagesPlan:
    """Plan stages with the options of `forerun.plan`. The budget is for all of them together."""
    return StagesPlan({stage.name: plan_stage(stage, **options) for stage in stages}, max_usd)


def plan_stage(stage: Stage, **options: Any) -> Plan:
    """Plan one stage. It does not need the weights of the stages before."""
    from forerun.verbs.plan import plan
    from forerun.verbs.stage_result import resolve_stage

    try:
        stage_plan = plan(resolve_stage(stage), **options)
    except UserError as error:
        raise UserError(error.code, f"stage {stage.name}: {error.what}", why=error.why, fix=error.fix) from None
    return replace(stage_plan, title=f"stage {stage_plan.title}", notes=(stage.start_text, *stage_plan.notes))


def check_stage(stage: Stage, on: str | None = None) -> JobReport:
    """Return the report of one stage. It does not need the weights of the stages before."""
    from forerun.verbs.check.check import check_loaded
    from forerun.verbs.stage_result import outline_of

    return check_loaded(stage.loaded, on, outline_of(stage))


def begin_stages(stages: Sequence[Stage], first: Stage, *, fresh: bool, take_over: bool) -> None:
    """Write the list of stages for `runs/NAME`. With `fresh`, rename the runs of `first` and all later stages."""
    from forerun.run_folder.run_folder import rename_existing_run
    from forerun.run_folder.stage_folder import write_stage_names
    from forerun.verbs.train import run_lock

    if fresh:
        for stage in stages[list(stages).index(first) :]:
            with run_lock(stage.job, take_over=take_over, reporter=LineReporter(sys.stderr)):
                rename_existing_run(stage.job)
    write_stage_names(stages)


def ready_to_train(stages: Sequence[Stage], stage: Stage, reporter: Reporter) -> Job | None:
    """Return the job of a stage, after the result of the stage before was written. Return None if it is finished.

    Raises:
      UserError: the stage before is not finished, or this stage was changed after the next one had started.
    """
    from forerun.hardware.devices import choose
    from forerun.run.summary import finished_summary
    from forerun.verbs.stage_result import ready_job, require_unused, resolve_stage

    position = list(stages).index(stage)
    reporter.info(f"\nstage {stage.name}, {position + 1} of {len(stages)}: {stage.start_text}")
    choose(stage.job.device, stage.job.devices)  # jax opens only the devices of the job
    if stage.job.steps is not None and finished_summary(resolve_stage(stage), reporter) is not None:
        return None
    require_unused(stage, stages[position + 1] if position + 1 < len(stages) else None)
    return ready_job(stage, reporter)
