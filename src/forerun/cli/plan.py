"""`forerun plan`: does the job fit, how long, how much? Asked of the TPU compiler, on a machine without a TPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.job_warnings import print_warnings
from forerun.config.load import load
from forerun.errors import StorageError, UserError
from forerun.files import write_output
from forerun.models.plugin import use_job_folder

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.plan.money import Tariff
    from forerun.plan.question import Impossible, Question
    from forerun.plan.verdict import Verdict

PIPED_COLUMNS = 120


def run(args: argparse.Namespace) -> int:
    loaded = load(args.job, args.overrides)
    if args.html:
        _require_folder(Path(args.html))
    from forerun.plan.question import slices_named

    slices = slices_named(args.on) if args.on and not args.search else []
    from forerun.plan.money import Tariff

    tariff = Tariff(args.zone, args.prices, args.max_usd)
    tariff.check()
    use_job_folder(loaded.path.parent)
    from forerun.loop.concrete import concrete
    from forerun.plan.order import in_order, order_note
    from forerun.plan.question import possible_questions

    print_warnings(loaded.job)
    job = concrete(loaded.job)
    asker = _Asker(args)
    if args.search:
        return _search(args, job, asker)
    changes: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    if slices:
        questions, asker.impossible = possible_questions(job, slices)
        verdicts = asker.ask_each(questions) if questions else []
    else:
        verdicts, changes, notes = _compared(job, asker)
    if not verdicts:
        raise asker.impossible[0].raised()
    verdicts = in_order(verdicts, args.goal, tariff)
    notes = [*filter(None, [order_note(verdicts, args.goal, tariff)]), *notes, *asker.notes()]
    _show(args, job, verdicts, asker.impossible, tariff, changes, notes)
    return _judged(verdicts, tariff, asker)


class _Asker:
    """Asks the compiler, or the cache of what it said before; corrects times by the user's own runs if told to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.quiet: bool = args.json
        self.impossible: list[Impossible] = []
        self._fresh: bool = args.no_cache
        self._calibration = None
        if args.calibrate:
            from forerun.plan.calibration import calibration

            self._calibration = calibration(args.calibrate)

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return a verdict for each question, or raise the first error."""
        from forerun.plan.answers import answers
        from forerun.plan.progress import Progress

        with Progress(list(questions), plain_lines=not self.quiet) as progress:
            verdicts = answers(questions, progress.phase, self._judge())
        return [self.adjusted(v) for v in verdicts]

    def ask_each(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return the verdicts; slices on which the job cannot be built or compiled go to `impossible`."""
        from forerun.plan.answers import answers
        from forerun.plan.progress import Progress
        from forerun.plan.question import Impossible

        judge = self._judge()

        def tolerant(question: Question, *rest: Any) -> Verdict | None:
            try:
                return judge(question, *rest)
            except StorageError:
                raise
            except UserError as error:
                self.impossible.append(Impossible(question.slice, error))
                return None

        with Progress(list(questions), plain_lines=not self.quiet) as progress:
            verdicts = answers(questions, progress.phase, tolerant)
        return [self.adjusted(v) for v in verdicts]

    def _judge(self) -> Callable[..., Verdict]:
        from forerun.plan.cache import cached_verdict
        from forerun.plan.verdict import verdict

        return verdict if self._fresh else cached_verdict

    def adjusted(self, v: Verdict) -> Verdict:
        if self._calibration is None or v.step is None:
            return v
        return replace(v, step=self._calibration.applied(v.step, v.question.slice.chip.name))

    def notes(self) -> list[str]:
        return [self._calibration.told()] if self._calibration else []


def _search(args: argparse.Namespace, job: Job, asker: _Asker) -> int:
    from forerun.loop.starting_weights import starting_weights
    from forerun.plan.search import run_search

    _announce(f"the run starts with {starting_weights(job)}", asker.quiet)
    return run_search(
        job,
        goal=args.goal,
        max_hours=args.max_hours,
        max_usd=args.max_usd,
        on=args.on,
        zone=args.zone,
        prices_file=args.prices,
        out_path=Path(args.out) if args.out else None,
        use_cache=not args.no_cache,
        adjust=asker.adjusted,
        as_json=args.json,
    )


def _compared(job: Job, asker: _Asker) -> tuple[list[Verdict], dict[str, tuple[str, ...]], list[str]]:
    """The sensible slices of every generation, in two rounds."""
    from forerun.plan.defaults import sensible

    choice = sensible(job)
    candidates = choice.first()
    _announce(f"comparing {len(candidates)} slices, then the next larger ones (--on names your own)", asker.quiet)
    verdicts = asker.ask_each([one.question for one in candidates])
    if more := choice.second(verdicts):
        _announce(f"now {', '.join(one.question.slice.name for one in more)}", asker.quiet)
        candidates += more
        verdicts += asker.ask_each([one.question for one in more])
    changes = {one.question.slice.name: one.changes for one in candidates if one.changes}
    notes = [f"{name}: laid out with {' '.join(made)}" for name, made in changes.items()]
    return verdicts, changes, [*notes, *choice.notes(candidates)]


def _announce(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def _show(
    args: argparse.Namespace,
    job: Job,
    verdicts: list[Verdict],
    impossible: list[Impossible],
    tariff: Tariff,
    changes: dict[str, tuple[str, ...]],
    notes: list[str],
) -> None:
    from forerun.loop.starting_weights import starting_weights
    from forerun.plan.report import as_json, print_table

    model = job.model.name or "free dimensions"
    notes = [f"the run starts with {starting_weights(job)}", *notes]
    title = f"{job.name}: {model}, {job.steps} steps of {job.batch} x {job.sequence} tokens, remat {job.remat.policy}"
    if args.json:
        import json

        print(json.dumps(as_json(verdicts, tariff, changes, impossible), indent=2))
    else:
        from forerun.console import SafeConsole

        console = SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        print_table(console, verdicts, title, tariff, notes, impossible)
    sys.stdout.flush()
    if args.html:
        from forerun.plan.page import page

        text = page(job, verdicts, tariff, title, notes, impossible)
        write_output(Path(args.html), text, fix="name another file with --html")
        print(f"page: {args.html}", file=sys.stderr)


def _judged(verdicts: list[Verdict], tariff: Tariff, asker: _Asker) -> int:
    from forerun.plan.refusal import does_not_fit, nearest, over_budget
    from forerun.plan.remedies import verified

    if not any(v.fits for v in verdicts):
        near = nearest(verdicts)
        _announce(f"compiling what could make it fit {near.question.slice.name}", asker.quiet)
        raise does_not_fit(verdicts, verified(near, asker.ask))
    if tariff.max_usd is not None and (error := over_budget(verdicts, tariff)):
        raise error
    return 0


def _require_folder(file: Path) -> None:
    """Before minutes of compiling, not after."""
    if not file.parent.is_dir():
        raise UserError(
            f"--html {file}: there is no folder {file.parent}",
            why="the page is one file",
            fix=f"mkdir -p {file.parent}",
        )
    if file.is_dir():
        raise UserError(f"--html {file} is a folder", why="the page is one file", fix=f"--html {file / 'plan.html'}")
