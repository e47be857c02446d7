"""`forerun plan`: predict memory, time and cost of a job on TPUs and GPUs, without the devices."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.options.job_warnings import print_warnings
from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.config.stages import Stage
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.verbs.plan.plan import Plan
    from forerun.verbs.stages.stages import StagesPlan


def run(args: argparse.Namespace) -> int:
    """Print the plan, write its page, and fail if no slice fits within the budget."""
    from forerun.planner.compile.fork_server import fork_server

    with fork_server() as server:
        # The server imports jax while this process reads the job. With stored results it may not be needed.
        if (os.cpu_count() or 1) > 1 and (args.no_cache or not _has_stored_results()):
            server.start()
        return _run(args)


def _has_stored_results() -> bool:
    from forerun.planner.compile.result_folder import folder

    return any(folder().glob("*.json"))


def _run(args: argparse.Namespace) -> int:
    from forerun.cli.options.stage_choice import chosen_stages, require_one
    from forerun.verbs.job_files import load_job

    stages = chosen_stages(args)
    for option in ("--html", "--search", "--trace"):
        if getattr(args, option.removeprefix("--")):
            require_one(stages, option)
    job = None if stages else load_job(args.job, *args.overrides)
    if args.html:
        _require_folder("--html", Path(args.html), "plan.html")
    if args.trace:
        _require_traceable(args)
    if args.on and not args.search:
        from forerun.planner.compile.request import slices_named

        slices_named(args.on)  # rejects an unknown slice before the slow imports
    from forerun.hardware.prices import provider_names
    from forerun.planner.cost.job_cost import Tariff

    Tariff(args.zone, args.prices, args.max_usd, provider_names(args.provider)).check()
    resolved = _resolved(job, stages)
    if args.search:
        return _search(args, resolved[0])
    for resolved_job in resolved:
        print_warnings(resolved_job)
    options: dict[str, Any] = {
        "on": args.on,
        "goal": args.goal,
        "zone": args.zone,
        "provider": args.provider,
        "prices": args.prices,
        "max_usd": args.max_usd,
        "calibrate": args.calibrate or (),
        "use_cache": not args.no_cache,
        "progress": not args.json,
    }
    if not stages:
        from forerun.verbs.plan.plan import plan_resolved

        return _show(args, plan_resolved(resolved[0], **options))
    from forerun.verbs.stages.stages import plan_stage, plan_stages

    return _show(args, plan_stage(stages[0], **options) if len(stages) == 1 else plan_stages(stages, **options))


def _resolved(job: Job | None, stages: Sequence[Stage]) -> list[ResolvedJob]:
    """Return the job of the file, or those of its stages."""
    if job is not None:
        from forerun.resolve.resolve_model import resolve_model

        return [resolve_model(job)]
    from forerun.verbs.stages.stage_outline import resolve_stage

    return [resolve_stage(stage) for stage in stages]


def _show(args: argparse.Namespace, found: Plan | StagesPlan) -> int:
    from forerun.verbs.plan.plan import PIPED_COLUMNS

    if args.json:
        import json

        print(json.dumps(found.to_dict(), indent=2))
    else:
        from forerun.console import SafeConsole

        found.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS))
    sys.stdout.flush()
    if args.html:
        found.save_html(args.html)  # type: ignore[union-attr]  # `require_one` rejects several stages
        print(f"page: {args.html}", file=sys.stderr)
    if args.trace and found.fits:  # otherwise `require_fit` raises, and names changes that help
        found.save_trace(args.trace)  # type: ignore[union-attr]  # as above
        print(f"trace of a simulated step: {args.trace} (open it at https://ui.perfetto.dev)", file=sys.stderr)
    found.require_fit()
    return 0


def _search(args: argparse.Namespace, resolved: ResolvedJob) -> int:
    """Search, print the ranking, and write the best plan as a job file."""
    from forerun.hardware.prices import provider_names
    from forerun.planner.search.search import run_search
    from forerun.resolve.job_corpus import with_steps
    from forerun.verbs.plan.slice_compiler import SliceCompiler

    print_warnings(resolved)
    resolved = with_steps(resolved)
    compiler = SliceCompiler(use_cache=not args.no_cache, calibrate=args.calibrate or (), quiet=args.json)
    compiler.reporter.info(f"the run starts with {resolved.starting_weights}")
    return run_search(
        resolved,
        goal=args.goal,
        max_hours=args.max_hours,
        max_usd=args.max_usd,
        on=args.on,
        zone=args.zone,
        providers=provider_names(args.provider),
        prices_file=args.prices,
        out_path=Path(args.out) if args.out else None,
        use_cache=not args.no_cache,
        adjust=compiler.calibrated,
        as_json=args.json,
        compile_all=args.search == "all",
    )


def _require_traceable(args: argparse.Namespace) -> None:
    """Raise if no trace can be written, before minutes of compiling."""
    from forerun.planner.compile.request import slices_named
    from forerun.planner.trace.request import require_one_slice

    if args.search:
        raise UserError(
            "E-PLAN-025",
            "--trace does not work together with --search",
            why="a search compares many plans, and a trace shows a step of one",
            fix="run the search first, then plan the job that it writes with --trace and --on",
        )
    require_one_slice([one.name for one in slices_named(args.on or [])])
    _require_folder("--trace", Path(args.trace), "step.json.gz")


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
