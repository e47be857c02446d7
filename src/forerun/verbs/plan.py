"""`plan` and `search`: does a job fit, how long does it take, and what does it cost? Compiled without the device."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forerun.errors import UserError
from forerun.files import write_output
from forerun.verbs.job_files import load_job, prepared
from forerun.verbs.option_types import Dollars, File, Hours, Providers, Slices, Value, Zone, comma_list

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from forerun.config.schema import Job
    from forerun.hardware.object_storage import StorageReads
    from forerun.planner.compile.fit_result import FitResult
    from forerun.planner.compile.request import Impossible
    from forerun.planner.cost.job_cost import Tariff
    from forerun.planner.search.outcome import SearchOutcome
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.verbs.slice_compiler import SliceCompiler

Goal = Literal["cheapest", "fastest", "balanced"]
Runs = Annotated[Sequence[str], Value("RUNS", comma_list)]
PIPED_COLUMNS = 120


@dataclass(frozen=True)
class Plan:
    """The result of `plan`: one row per slice, with memory, step time, hours and dollars.

    Printing it shows the table of `forerun plan`; a notebook shows a compact page.

    Attributes:
      job: the job with its open values filled in.
      title: the model, the steps and the size of the batch in one line.
      notes: remarks about the comparison, such as assumptions and slices that were omitted.
    """

    job: Job
    title: str
    notes: tuple[str, ...]
    _results: tuple[FitResult, ...]
    _impossible: tuple[Impossible, ...]
    _tariff: Tariff
    _changes: Mapping[str, tuple[str, ...]]
    _compiler: SliceCompiler = field(repr=False, compare=False)
    _storage: StorageReads | None = None

    @property
    def fits(self) -> bool:
        """Whether the job fits at least one slice."""
        return any(result.fits for result in self._results)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per slice, best first. The keys are those of `forerun plan --json` and are stable."""
        rows: list[dict[str, Any]] = self.to_dict()["slices"]
        return rows

    @property
    def best(self) -> dict[str, Any] | None:
        """The first row that fits, by the goal of the plan, or None if the job fits no slice."""
        return next((row for row in self.rows if row["fits"]), None)

    def require_fit(self) -> Plan:
        """Return the plan, or raise if it has no slice that fits within the budget.

        Raises:
          UserError: No slice fits; the fix names changes of the job that were compiled and do fit. Or everything that
            fits costs more than `max_usd`.
        """
        from forerun.planner.report.remedies import does_not_fit, nearest, over_budget, verified

        if not self.fits:
            near = nearest(self._results)
            self._compiler.reporter.info(f"compiling changes that could make the job fit {near.slice_name}")
            raise does_not_fit(self._results, verified(near, self._compiler.compile))
        if self._tariff.max_usd is not None and (error := over_budget(self._results, self._tariff)):
            raise error
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `forerun plan --json` prints it."""
        from forerun.planner.report.plan_json import as_json

        storage = {} if self._storage is None else {"storage": self._storage.to_json()}
        return as_json(self._results, self._tariff, self._changes, self._impossible) | storage

    def to_html(self) -> str:
        """Return the complete page with charts that `forerun plan --html` writes."""
        from forerun.planner.report.page import page

        notes = self.notes if self._storage is None else (*self.notes, self._storage.recommendation)
        return page(self.job, self._results, self._tariff, self.title, notes, self._impossible)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the complete page to a file. It loads nothing from the network and runs no script."""
        write_output(Path(file), self.to_html(), fix="name another file with --html")

    def save_trace(self, file: str | os.PathLike[str], *, on: str | None = None) -> None:
        """Write the simulated timeline of one step, which https://ui.perfetto.dev opens. Nothing in it is measured.

        Args:
          file: the file to write, such as `step.json.gz`. It is compressed if its name ends with `.gz`.
          on: the slice; default: the only slice of the plan.

        Raises:
          UserError: The plan has several slices and `on` names none of them, or the job does not fit the slice.
        """
        from forerun.planner.trace import SimulatedStep, encoded, require_one_slice, trace_content
        from forerun.version import __version__

        file, name = Path(file), require_one_slice([result.slice_name for result in self._results], on)
        result = next(result for result in self._results if result.slice_name == name)
        if result.step is None:
            raise UserError(
                "E-PLAN-026",
                f"{name}: there is no timeline, because the job does not fit",
                why="the compiler schedules only programs that fit the memory of a device",
                fix="choose a larger slice, or change the job as `forerun plan` suggests",
            )
        job = result.question.job
        facts = {
            "job": job.name,
            "model": str(job.model.name or "free dimensions"),
            "slice": name,
            "mesh": result.mesh,
            "tokens_per_step": result.tokens_per_step,
            "program": result.program,
            "forerun": __version__,
        }
        module = self._compiler.scheduled_program(result)
        simulated = SimulatedStep(module=module, slice=result.question.slice, step=result.step, facts=facts)
        content = encoded(trace_content(simulated), compress=file.suffix == ".gz")
        write_output(file, content, fix="name another file with --trace")

    def print(self, console: Console) -> None:
        """Print the table, as wide as the console allows."""
        from forerun.hardware.object_storage import storage_table
        from forerun.planner.report.table import print_table

        print_table(console, self._results, self.title, self._tariff, self.notes, self._impossible)
        if self._storage is not None:
            console.print()
            console.print(storage_table(self._storage))

    def __repr__(self) -> str:
        from forerun.console import SafeConsole

        stream = io.StringIO()
        self.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
        return stream.getvalue().rstrip("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with console.capture() as captured:
            self.print(console)
        from rich.text import Text

        yield Text.from_ansi(captured.get())

    def _repr_html_(self) -> str:
        from forerun.planner.report.page import compact_page

        return compact_page(self.job, self._results, self._tariff, self.title, self.notes, self._impossible)


def plan(
    job: Job | ResolvedJob | str | os.PathLike[str],
    *,
    on: Slices | None = None,
    goal: Goal = "balanced",
    zone: Zone | None = None,
    provider: Providers = (),
    prices: File | None = None,
    max_usd: Dollars | None = None,
    calibrate: Runs = (),
    use_cache: Annotated[bool, Value(option="no-cache", help="ignore cached results and compile again")] = True,
    progress: bool = True,
) -> Plan:
    """Compile a job for TPU slices and GPU machines, and predict memory, time and cost. No device is needed.

    Args:
      job: a job, or the path of a job file
      on: slices and GPU machines to plan for, for example v6e-8,h100-8 (default: those that may fit)
      goal: how to order slices, and what a search optimises for; balanced is time x money
      zone: use the prices of this zone (default: the cheapest)
      provider: use only prices of these providers, for example gcp,lambda (default: the cheapest)
      prices: use the prices in this file instead of list prices
      max_usd: budget: mark slices that cost more, and fail if all do; a search omits plans that cost more
      calibrate: correct the times by these finished runs
      use_cache: use results of earlier compilations of the same program
      progress: print progress to stderr

    Returns:
      The plan. A job that fits nowhere is not an error here: see `Plan.fits` and `Plan.require_fit`.

    Raises:
      UserError: The job has a mistake, a slice does not exist, or the job cannot be built for any of the slices.
    """
    from forerun.hardware.prices import provider_names
    from forerun.planner.compile.request import possible_requests, slices_named
    from forerun.planner.cost.job_cost import Tariff
    from forerun.planner.cost.storage_reads import planned_reads
    from forerun.planner.search.ranking import in_order, order_note
    from forerun.resolve.job_corpus import with_steps
    from forerun.resolve.resolve_model import resolve_model
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.verbs.slice_compiler import SliceCompiler, compare_default_slices

    resolved = job if isinstance(job, ResolvedJob) else resolve_model(prepared(job))
    slices = slices_named([on] if isinstance(on, str) else list(on)) if on else []
    tariff = Tariff(zone, None if prices is None else os.fspath(prices), max_usd, provider_names(provider))
    tariff.check()
    resolved = with_steps(resolved)
    compiler = SliceCompiler(use_cache=use_cache, calibrate=calibrate, quiet=not progress)
    changes: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    if slices:
        compiler.keeps_programs = len(slices) == 1  # for `Plan.save_trace`; the programs of many slices are large
        requests, compiler.impossible = possible_requests(resolved, slices)
        results = compiler.compile_possible(requests) if requests else []
    else:
        results, changes, notes = compare_default_slices(resolved, compiler)
    if not results:
        raise compiler.impossible[0].raised()
    results = in_order(results, goal, tariff)
    order = order_note(results, goal, tariff)
    written = resolved.job
    model = written.model.name or "free dimensions"
    return Plan(
        job=written,
        title=f"{written.name}: {model}, {written.steps} steps of {written.batch} x {written.sequence} tokens, "
        f"remat {written.remat.policy}",
        notes=(
            f"the run starts with {resolved.starting_weights}",
            *([order] if order else []),
            *notes,
            *_model_notes(resolved),
            *compiler.notes(),
        ),
        _results=tuple(results),
        _impossible=tuple(compiler.impossible),
        _tariff=tariff,
        _changes=changes,
        _compiler=compiler,
        _storage=planned_reads(resolved, results[0].question.slice.hosts),
    )


def _model_notes(resolved: ResolvedJob) -> list[str]:
    """Return what a user must know about the predictions for this kind of model."""
    from forerun.models.decoder_config import DecoderConfig

    config = resolved.config
    if isinstance(config, DecoderConfig) and any(kind.mixer == "delta" for kind in config.all_kinds):
        return ["the step time is optimistic: the simulation does not count the vector work of the gated delta layers"]
    return []


@dataclass(frozen=True)
class SearchResult:
    """The result of `search`: the plans that fit, best first, and the best one as a job.

    Attributes:
      goal: what the search optimised for.
      interrupted: whether Ctrl-C ended the search early; the plans are the best of those compiled until then.
    """

    goal: Goal
    interrupted: bool
    outcome: SearchOutcome = field(repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per plan that fits, best first. The keys are those of `forerun plan --search --json`."""
        return self.outcome.rows()

    @property
    def job_text(self) -> str:
        """The best plan as a job file, with comments about what the search changed."""
        return self.outcome.job_text()

    def save_job(self, file: str | os.PathLike[str]) -> Job:
        """Write the best plan as a job file and return the job."""
        self.outcome.write_job(Path(file))
        return load_job(file)

    def __repr__(self) -> str:
        from forerun.console import SafeConsole

        stream = io.StringIO()
        self.outcome.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
        return stream.getvalue().rstrip("\n")


def search(
    job: Job | str | os.PathLike[str],
    *,
    on: Slices | None = None,
    goal: Goal = "balanced",
    max_hours: Hours | None = None,
    max_usd: Dollars | None = None,
    zone: Zone | None = None,
    provider: Providers = (),
    prices: File | None = None,
    calibrate: Runs = (),
    use_cache: Annotated[bool, Value(option="no-cache", help="ignore cached results and compile again")] = True,
    compile_all: Annotated[bool, Value(option="search-all")] = False,
) -> SearchResult:
    """Search slices, meshes, micro-batch sizes and remat policies for the best plan.

    Args:
      job: a job, or the path of a job file
      on: slices or patterns such as v5p-* (default: all slices)
      goal: what to optimise for; balanced is time x money
      max_hours: with `search`: omit plans that take longer
      max_usd: omit plans that cost more
      zone: use the prices of this zone (default: the cheapest)
      provider: use only prices of these providers, for example gcp,lambda (default: the cheapest)
      prices: use the prices in this file instead of list prices
      calibrate: correct the times by these finished runs
      use_cache: use results of earlier compilations of the same program
      compile_all: like `search`, but compile all candidates that may fit, also those that are not expected to win

    Returns:
      The plans that fit within the limits, best first.

    Raises:
      UserError: No plan fits, or none stays within the limits.
    """
    from forerun.hardware.prices import provider_names
    from forerun.planner.search.search import find_plans
    from forerun.resolve.job_corpus import with_steps
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.slice_compiler import SliceCompiler

    compiler = SliceCompiler(use_cache=use_cache, calibrate=calibrate, quiet=False)
    outcome = find_plans(
        with_steps(resolve_model(prepared(job))),
        goal=goal,
        max_hours=max_hours,
        max_usd=max_usd,
        on=on,
        zone=zone,
        providers=provider_names(provider),
        prices_file=None if prices is None else os.fspath(prices),
        use_cache=use_cache,
        adjust=compiler.calibrated,
        compile_all=compile_all,
    )
    outcome.require_plan()
    return SearchResult(goal, outcome.interrupted, outcome)
