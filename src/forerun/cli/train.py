"""`forerun train`: train a job to its end, or resume it."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import interrupt
from forerun.cli.main import told
from forerun.config.load import LoadedJob, load, values
from forerun.config.stages import Stage, stage_named, stages_of
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED, STOPPED
from forerun.models.plugin import use_job_folder
from forerun.reporter import LineReporter
from forerun.run.profiling.step_range import range_of
from forerun.units import Count, Seconds

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.run.train import TrainResult
    from forerun.supervise.host_address import Hosts
    from forerun.supervise.worker import Worker

    Ready = Callable[[Worker], Job | None]


def run(args: argparse.Namespace) -> int:
    from forerun.supervise.worker import connect

    worker = connect(_imports)
    if args.profile:
        range_of(args.profile)  # raises before anything is read
    stages = stages_of(args.job, args.overrides)
    if stages or args.stage is not None:
        return _run_stages(args, stages, worker)
    loaded = load(args.job, args.overrides)
    if worker is None:
        _require_run_in_place(args, loaded)
        return _started_by_user(args, loaded)
    return _train(args, loaded, worker)


def _run_stages(args: argparse.Namespace, stages: Sequence[Stage], worker: Worker | None) -> int:
    """Train the chosen stages one after the other. A stage that stops early ends the command."""
    from forerun.supervise.worker import alone

    chosen = stages if args.stage is None else (stage_named(stages, args.stage),)
    if args.profile and len(chosen) > 1:
        raise UserError(
            "E-RUN-087",
            "--profile needs one stage",
            why=f"the file has {len(chosen)} stages, and the numbers of steps are those of one run",
            fix=f"add --stage {chosen[0].name}",
        )
    _require_one_host(args, stages, worker)
    if worker is None:
        from forerun.verbs.stages.stages import begin_stages

        for stage in chosen:
            _require_run_in_place(args, stage.loaded)
        begin_stages(stages, chosen[0], fresh=args.fresh, take_over=args.take_over)
    args.fresh = False  # the earlier runs are renamed now
    # One worker for all stages: a stop that is announced between two stages must not be lost.
    own = alone() if worker is None and not args.supervise else None
    for stage in chosen:
        ready = partial(_ready, stages, stage)
        if own is not None and own.stop.due():
            return STOPPED
        if worker is None:
            code = _started_by_user(args, stage.loaded, own, ready, ["--stage", stage.name])
        else:
            code = _train(args, stage.loaded, worker, ready)
        if code:
            return code
    return 0


def _require_run_in_place(args: argparse.Namespace, loaded: LoadedJob) -> None:
    """Raise if the run would start over because its folder was moved. On a terminal, ask first."""
    from forerun.run_folder.moved_run import require_run_in_place

    if not args.fresh:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        require_run_in_place(loaded.job, loaded.path, _agrees if is_terminal else None)


def _agrees(question: str) -> bool:
    return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")


def _require_one_host(args: argparse.Namespace, stages: Sequence[Stage], worker: Worker | None) -> None:
    if args.host or args.leader or (worker is None and _hosts(args, stages[0].loaded.job).count > 1):
        raise UserError(
            "E-COMMAND-040",
            "stages are trained on one host",
            why="the result of a stage is written by one process, and the other hosts would not have its files",
            fix=f"remove --host and --leader; or train the {len(stages)} stages as separate files, and export the "
            "run of each to a folder that all hosts can read",
        )


def _ready(stages: Sequence[Stage], stage: Stage, worker: Worker) -> Job | None:
    """Return the job of a stage after its start was written, or None if the stage is finished."""
    from forerun.verbs.stages.stages import ready_to_train

    worker.pulse.phase("stage result")
    return ready_to_train(stages, stage, LineReporter(sys.stdout))


def _started_by_user(
    args: argparse.Namespace,
    loaded: LoadedJob,
    worker: Worker | None = None,
    ready: Ready | None = None,
    options: Sequence[str] = (),
) -> int:
    """Take the lock of the run, then train or supervise. A supervisor's workers do not come here."""
    from forerun.verbs.train import run_lock

    hosts = _hosts(args, loaded.job)
    supervised = args.supervise or args.host or args.leader or hosts.count > 1
    lock: AbstractContextManager[None] = nullcontext()
    if not supervised or hosts.leads:  # host 0 holds the lock for all hosts
        lock = run_lock(loaded.job, take_over=args.take_over, reporter=LineReporter(sys.stderr))
    with lock:
        return _supervised(args, loaded, hosts, options) if supervised else _train(args, loaded, worker, ready)


def _hosts(args: argparse.Namespace, job: Job) -> Hosts:
    """Return the place of this host, from the options or from its TPU slice."""
    from forerun.supervise.host_address import discover, given

    if args.host or args.leader or (found := discover(job.device)) is None:
        return given(args.host, args.leader)
    print(f"hosts: {found.index} of {found.count} of this TPU slice, leader {found.address}", flush=True)
    return found


def _train(args: argparse.Namespace, loaded: LoadedJob, worker: Worker | None, ready: Ready | None = None) -> int:
    """Train in this process. `ready` returns the job of a stage, or None if the stage is finished."""
    from forerun.supervise.worker import alone

    use_job_folder(loaded.path.parent)
    from forerun.supervise.free_tpu import require_free_tpu_for

    if worker is None or worker.is_alone:
        require_free_tpu_for(loaded.job.device, LineReporter(sys.stdout))
        worker = worker or alone()
        interrupt.set_report(lambda: resumption(loaded.job, fresh=args.fresh))
    with worker.exit_on_failure(lambda error: told(error, sys.argv[1:])):
        if ready is not None:
            if (job := ready(worker)) is None:
                return 0
            loaded = replace(loaded, job=job)
        from forerun.track.display.make_display import make_display
        from forerun.verbs.train import train_here

        with make_display(sys.stdout if worker.first else open(os.devnull, "w", encoding="utf-8")) as reporter:
            steps = range_of(args.profile) if args.profile else None
            finished = train_here(loaded.job, reporter, fresh=args.fresh, worker=worker, profile=steps)
    if finished is None:
        return INTERRUPTED if interrupt.pressed() else STOPPED
    if worker.first and finished.state is not None:
        _tell(loaded, finished)
    return 0


def resumption(job: Job, *, fresh: bool = False) -> str:
    """Return where the same command resumes the run, from the checkpoints that are on the disk now."""
    from forerun.checkpoint.log import Log
    from forerun.run_folder.run_folder import folder_of
    from forerun.storage.address import Address
    from forerun.storage.folder import LocalFolder

    again = "the same command without --fresh" if fresh else "the same command"
    checkpoints = folder_of(job).checkpoints(job)
    if Address.of(checkpoints).is_remote:  # reading it may take longer than this process still has
        return f"{again} resumes from the newest checkpoint in {checkpoints}"
    commits = Log(LocalFolder(Path(checkpoints))).commits()
    if not commits:
        return "no checkpoint is saved, so the same command starts from the beginning"
    return f"the checkpoint of step {commits[-1].step} is saved; {again} resumes there"


def _imports() -> None:
    """Import the modules that take most of the time between the start and the first step."""
    importlib.import_module("forerun.run.train")


def _tell(loaded: LoadedJob, finished: TrainResult) -> None:
    from forerun.track.goodput import goodput_line

    summary: dict[str, Any] = finished.summary
    losses = [summary["first_loss"], summary["final_loss"]]
    # There is no loss if all steps were skipped or metrics.jsonl was deleted. A loss that is not finite is null there.
    first, final = ("unknown" if loss is None else f"{loss:.4f}" for loss in losses)
    print(
        f"\ndone: {summary['steps']} steps, loss {first} -> {final} "
        f"{summary['loss_unit']}, {Count(summary['tokens'])} tokens in {Seconds(summary['train_seconds'])}"
        + (f" (resumed at step {summary['resumed_at']})" if summary["resumed_at"] else "")
    )
    if summary.get("goodput"):
        print(f"      {goodput_line(summary['goodput'])}")
    job = loaded.job
    inside = ", checkpoints/" if job.checkpoint.folder is None else ""
    print(f"      {job.runs}/{job.name}/ holds job.yaml, metrics.jsonl, summary.json{inside}")
    if job.checkpoint.folder is not None:
        print(f"      {job.checkpoint.folder.rstrip('/')}/{job.name} holds the checkpoints and copies of these files")
    if finished.sample:
        print(f"\nsample:\n{finished.sample}")


def _supervised(args: argparse.Namespace, loaded: LoadedJob, hosts: Hosts, options: Sequence[str] = ()) -> int:
    """Supervise a child process that trains. It is restarted if it crashes or makes no progress.

    `options` are further options of the child.
    """
    from forerun.run_folder.run_folder import folder_of, rename_existing_run, require_usable
    from forerun.supervise.slice_policy import SlicePolicy
    from forerun.supervise.supervisor import supervise

    require_usable(loaded.job)
    if args.fresh and hosts.leads:
        rename_existing_run(loaded.job)
    command = [sys.executable, "-P", "-m", "forerun", "train", args.job, *args.overrides, *options]
    command += ["--profile", args.profile] if args.profile else []
    told = json.dumps({key: str(value) for key, value in values(loaded.job).items()}, sort_keys=True)
    identity = {"job": hashlib.sha256(told.encode()).hexdigest()[:16]}
    secret, mesh = Path(args.secret) if args.secret else None, loaded.job.mesh
    return supervise(
        command,
        hosts,
        folder_of(loaded.job).path,
        secret_file=secret,
        identity=identity,
        spare=True,
        slices=mesh.slices,
        policy=SlicePolicy.of(hosts.count, mesh.slices, mesh.min_slices, mesh.slice_wait_seconds),
    )
