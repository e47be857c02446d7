"""`forerun plan`: predict memory, time and cost of a job on TPUs and GPUs, without the devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.arguments import options_of
from forerun.cli.jobs import chosen_stages, print_warnings, require_one
from forerun.errors import UserError
from forerun.verbs.option_types import File, JobFile, Name, Override

if TYPE_CHECKING:
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.verbs.plan import Plan
    from forerun.verbs.stages import StagesPlan


@options_of("forerun.verbs.plan:plan", "forerun.verbs.plan:search")
def plan(
    job: JobFile,
    *overrides: Override,
    stage: Name | None = None,
    json: bool = False,
    html: File | None = None,
    trace: File | None = None,
    search: bool = False,
    out: File | None = None,
    **options: Any,
) -> int:
    """Print the plan, write its page, and fail if no slice fits within the budget.

    Args:
      stage: with stages: plan only this stage (default: all, and their total)
      json: print the results as JSON
      html: write a page with charts to this file
      trace: with one slice: write the simulated timeline of a step for Perfetto
      search: search slices, meshes, micro-batch sizes and remat policies for the best plan
      out: with `search`: file for the best plan as a job
    """
    from forerun.planner.compile.fork_server import fork_server
    from forerun.planner.compile.result_folder import folder

    compile_all, max_hours = options.pop("compile_all", False), options.pop("max_hours", None)
    search = search or compile_all
    with fork_server() as server:
        # The server imports jax while this process reads the job. With stored results it may not be needed.
        if (os.cpu_count() or 1) > 1 and not (options.get("use_cache", True) and any(folder().glob("*.json"))):
            server.start()
        stages = chosen_stages(job, overrides, stage)
        for option, value in (("--html", html), ("--search", search), ("--trace", trace)):
            if value:
                require_one(stages, option)
        loaded = None
        if not stages:
            from forerun.verbs.job_files import load_job

            loaded = load_job(job, *overrides)
        if html:
            _require_folder("--html", Path(html), "plan.html")
        if trace:
            _require_traceable(Path(trace), options.get("on"), search)
        _require_known_names(options, search)
        from forerun.resolve.resolve_model import resolve_model
        from forerun.verbs.stage_result import resolve_stage

        resolved = [resolve_model(loaded)] if loaded is not None else [resolve_stage(one) for one in stages]
        if search:
            limits = {"max_hours": max_hours, "compile_all": compile_all, "out_path": Path(out) if out else None}
            return _search(resolved[0], json, options, limits)
        for one in resolved:
            print_warnings(one)
        options["progress"] = not json
        if not stages:
            from forerun.verbs.plan import plan as plan_job

            return _show(plan_job(resolved[0], **options), json, html, trace)
        from forerun.verbs.stages import plan_stage, plan_stages

        found = plan_stage(stages[0], **options) if len(stages) == 1 else plan_stages(stages, **options)
        return _show(found, json, html, trace)


def _show(
    found: Plan | StagesPlan, as_json: bool, html: str | os.PathLike[str] | None, trace: str | os.PathLike[str] | None
) -> int:
    from forerun.verbs.plan import PIPED_COLUMNS

    if as_json:
        from json import dumps

        print(dumps(found.to_dict(), indent=2))
    else:
        from forerun.console import SafeConsole

        found.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS))
    sys.stdout.flush()
    if html:
        found.save_html(html)  # type: ignore[union-attr]  # `require_one` rejects several stages
        print(f"page: {html}", file=sys.stderr)
    if trace and found.fits:  # otherwise `require_fit` raises, and names changes that help
        found.save_trace(trace)  # type: ignore[union-attr]  # as above
        print(f"trace of a simulated step: {trace} (open it at https://ui.perfetto.dev)", file=sys.stderr)
    found.require_fit()
    return 0


def _search(resolved: ResolvedJob, as_json: bool, options: dict[str, Any], limits: dict[str, Any]) -> int:
    """Search, print the ranking, and write the best plan as a job file."""
    from forerun.hardware.prices import provider_names
    from forerun.planner.search.search import run_search
    from forerun.resolve.job_corpus import with_steps
    from forerun.verbs.slice_compiler import SliceCompiler

    print_warnings(resolved)
    resolved, use_cache = with_steps(resolved), options.get("use_cache", True)
    compiler = SliceCompiler(use_cache=use_cache, calibrate=options.get("calibrate", ()), quiet=as_json)
    compiler.reporter.info(f"the run starts with {resolved.starting_weights}")
    return run_search(
        resolved,
        goal=options.get("goal", "balanced"),
        max_usd=options.get("max_usd"),
        on=options.get("on"),
        zone=options.get("zone"),
        providers=provider_names(options.get("provider", ())),
        prices_file=options.get("prices"),
        use_cache=use_cache,
        adjust=compiler.calibrated,
        as_json=as_json,
        **limits,
    )


def _require_known_names(options: dict[str, Any], search: bool) -> None:
    """Raise for an unknown slice, price or provider before the slow imports."""
    from forerun.hardware.prices import provider_names
    from forerun.planner.compile.request import slices_named
    from forerun.planner.cost.job_cost import Tariff

    if options.get("on") and not search:
        slices_named(options["on"])
    providers = provider_names(options.get("provider", ()))
    Tariff(options.get("zone"), options.get("prices"), options.get("max_usd"), providers).check()


def _require_traceable(file: Path, on: list[str] | None, search: bool) -> None:
    """Raise if no trace can be written, before minutes of compiling."""
    from forerun.planner.compile.request import slices_named
    from forerun.planner.trace import require_one_slice

    if search:
        raise UserError(
            "E-PLAN-025",
            "--trace does not work together with --search",
            why="a search compares many plans, and a trace shows a step of one",
            fix="run the search first, then plan the job that it writes with --trace and --on",
        )
    require_one_slice([one.name for one in slices_named(on or [])])
    _require_folder("--trace", file, "step.json.gz")


def _require_folder(option: str, file: Path, name: str) -> None:
    """Raise if the file of an option cannot be written, before minutes of compiling."""
    if not file.parent.is_dir():
        raise UserError(
            "E-COMMAND-019",
            f"{option} {file}: there is no folder {file.parent}",
            why="the option names one file",
            fix=f"mkdir -p {file.parent}",
        )
    if file.is_dir():
        raise UserError(
            "E-COMMAND-020",
            f"{option} {file} is a folder",
            why="the option names one file",
            fix=f"{option} {file / name}",
        )
