"""`forerun train`: train a job to its end, or resume it."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun import interrupt
from forerun.cli.arguments import options_of
from forerun.cli.main import told
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED, STOPPED
from forerun.reporter import LineReporter
from forerun.units import Count, Seconds
from forerun.verbs.option_types import File, JobFile, Name, Override, Value

if TYPE_CHECKING:
    from forerun.config.load import LoadedJob
    from forerun.config.schema import Job
    from forerun.config.stages import Stage
    from forerun.run.train import TrainResult
    from forerun.supervise.host_address import Hosts
    from forerun.supervise.worker import Worker

    Ready = Callable[[Worker], Job | None]


@options_of("forerun.verbs.train:train")
def train(
    job: JobFile,
    *overrides: Override,
    stage: Name | None = None,
    supervise: bool = False,
    host: Annotated[str, Value("I/N")] | None = None,
    leader: Annotated[str, Value("ADDRESS")] | None = None,
    secret: File | None = None,
    **options: Any,
) -> int:
    """Train a job to its end, or resume it.

    Args:
      stage: with stages: train only this stage (default: all, in their order)
      supervise: restart the run if it crashes or makes no progress
      host: host I of N, counted from 0 (with `leader`), or auto on a TPU slice; implies `supervise`
      leader: address of host 0 inside the cluster: HOST or HOST:PORT
      secret: file with the secret of the run, the same on all hosts (or FORERUN_SECRET)
    """
    from forerun.config.load import load
    from forerun.config.stages import stages_of
    from forerun.run.step_range import range_of
    from forerun.supervise.worker import connect

    worker = connect(_imports)
    command = TrainCommand(job, overrides, supervise, host, leader, secret, **options)
    if command.profile:
        range_of(command.profile)  # raises before anything is read
    stages = stages_of(job, overrides)
    if stages or stage is not None:
        return command.run_stages(stages, stage, worker)
    loaded = load(job, overrides)
    if worker is not None:
        return command.train(loaded, worker)
    command.require_run_in_place(loaded)
    return command.start(loaded)


@dataclass(frozen=True)
class TrainCommand:
    """The arguments of `forerun train`, and the steps that depend on them."""

    path: str
    overrides: Sequence[str]
    supervise: bool
    host: str | None
    leader: str | None
    secret: str | os.PathLike[str] | None
    fresh: bool = False
    take_over: bool = False
    profile: str | None = None

    def run_stages(self, stages: Sequence[Stage], name: str | None, worker: Worker | None) -> int:
        """Train the chosen stages one after the other. A stage that stops early ends the command."""
        from forerun.config.stages import stage_named
        from forerun.supervise.worker import alone

        chosen = stages if name is None else (stage_named(stages, name),)
        if self.profile and len(chosen) > 1:
            raise UserError(
                "E-RUN-087",
                "--profile needs one stage",
                why=f"the file has {len(chosen)} stages, and the numbers of steps are those of one run",
                fix=f"add --stage {chosen[0].name}",
            )
        if self.host or self.leader or (worker is None and self._hosts(stages[0].loaded.job).count > 1):
            raise UserError(
                "E-COMMAND-040",
                "stages are trained on one host",
                why="the result of a stage is written by one process, and the other hosts would not have its files",
                fix=f"remove --host and --leader; or train the {len(stages)} stages as separate files, and export the "
                "run of each to a folder that all hosts can read",
            )
        if worker is None:
            from forerun.verbs.stages import begin_stages

            for stage in chosen:
                self.require_run_in_place(stage.loaded)
            begin_stages(stages, chosen[0], fresh=self.fresh, take_over=self.take_over)
        command = replace(self, fresh=False)  # the earlier runs are renamed now
        # One worker for all stages: a stop that is announced between two stages must not be lost.
        own = alone() if worker is None and not self.supervise else None
        for stage in chosen:
            ready = partial(_ready, stages, stage)
            if own is not None and own.stop.due():
                return STOPPED
            if worker is None:
                code = command.start(stage.loaded, own, ready, ["--stage", stage.name])
            else:
                code = command.train(stage.loaded, worker, ready)
            if code:
                return code
        return 0

    def require_run_in_place(self, loaded: LoadedJob) -> None:
        """Raise if the run would start over because its folder was moved. On a terminal, ask first."""
        from forerun.run_folder.open_folder import require_run_in_place

        if not self.fresh:
            is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
            require_run_in_place(loaded.job, loaded.path, _agrees if is_terminal else None)

    def start(
        self,
        loaded: LoadedJob,
        worker: Worker | None = None,
        ready: Ready | None = None,
        options: Sequence[str] = (),
    ) -> int:
        """Take the lock of the run, then train or supervise. A supervisor's workers do not come here.

        Args:
          loaded: the job.
          worker: the worker of this process, if it exists already.
          ready: returns the job of a stage, or None if the stage is finished.
          options: further options of a supervised child.
        """
        from forerun.verbs.train import run_lock

        hosts = self._hosts(loaded.job)
        is_supervised = self.supervise or self.host or self.leader or hosts.count > 1
        lock: AbstractContextManager[None] = nullcontext()
        if not is_supervised or hosts.leads:  # host 0 holds the lock for all hosts
            lock = run_lock(loaded.job, take_over=self.take_over, reporter=LineReporter(sys.stderr))
        with lock:
            return self._supervise(loaded, hosts, options) if is_supervised else self.train(loaded, worker, ready)

    def train(self, loaded: LoadedJob, worker: Worker | None, ready: Ready | None = None) -> int:
        """Train in this process. `ready` returns the job of a stage, or None if the stage is finished."""
        from forerun.models.plugin import use_job_folder
        from forerun.run.step_range import range_of
        from forerun.supervise.free_tpu import require_free_tpu_for
        from forerun.supervise.worker import alone

        use_job_folder(loaded.path.parent)
        if worker is None or worker.is_alone:
            require_free_tpu_for(loaded.job.device, LineReporter(sys.stdout))
            worker = worker or alone()
            interrupt.set_report(lambda: resumption(loaded.job, fresh=self.fresh))
        with worker.exit_on_failure(lambda error: told(error, sys.argv[1:])):
            if ready is not None:
                if (job := ready(worker)) is None:
                    return 0
                loaded = replace(loaded, job=job)
            from forerun.run.train import train as train_run
            from forerun.track.display.make_display import make_display

            with make_display(sys.stdout if worker.first else open(os.devnull, "w", encoding="utf-8")) as reporter:
                steps = range_of(self.profile) if self.profile else None
                finished = train_run(loaded.job, reporter, fresh=self.fresh, worker=worker, profile=steps)
        if finished is None:
            return INTERRUPTED if interrupt.pressed() else STOPPED
        if worker.first and finished.state is not None:
            _print_summary(loaded.job, finished)
        return 0

    def _hosts(self, job: Job) -> Hosts:
        """Return the place of this host, from the options or from its TPU slice."""
        from forerun.supervise.host_address import discover, given

        if self.host or self.leader or (found := discover(job.device)) is None:
            return given(self.host, self.leader)
        print(f"hosts: {found.index} of {found.count} of this TPU slice, leader {found.address}", flush=True)
        return found

    def _supervise(self, loaded: LoadedJob, hosts: Hosts, options: Sequence[str]) -> int:
        """Supervise a child process that trains. It is restarted if it crashes or makes no progress."""
        from forerun.config.load import values
        from forerun.run_folder.run_folder import folder_of, rename_existing_run, require_usable
        from forerun.supervise.slice_policy import SlicePolicy
        from forerun.supervise.supervisor import supervise

        require_usable(loaded.job)
        if self.fresh and hosts.leads:
            rename_existing_run(loaded.job)
        command = [sys.executable, "-P", "-m", "forerun", "train", self.path, *self.overrides, *options]
        command += ["--profile", self.profile] if self.profile else []
        content = json.dumps({key: str(value) for key, value in values(loaded.job).items()}, sort_keys=True)
        mesh = loaded.job.mesh
        return supervise(
            command,
            hosts,
            folder_of(loaded.job).path,
            secret_file=Path(self.secret) if self.secret else None,
            identity={"job": hashlib.sha256(content.encode()).hexdigest()[:16]},
            spare=True,
            slices=mesh.slices,
            policy=SlicePolicy.of(hosts.count, mesh.slices, mesh.min_slices, mesh.slice_wait_seconds),
        )


def _agrees(question: str) -> bool:
    return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")


def _ready(stages: Sequence[Stage], stage: Stage, worker: Worker) -> Job | None:
    """Return the job of a stage after its start was written, or None if the stage is finished."""
    from forerun.verbs.stages import ready_to_train

    worker.pulse.phase("stage result")
    return ready_to_train(stages, stage, LineReporter(sys.stdout))


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


def _print_summary(job: Job, finished: TrainResult) -> None:
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
    inside = ", checkpoints/" if job.checkpoint.folder is None else ""
    print(f"      {job.runs}/{job.name}/ holds job.yaml, metrics.jsonl, summary.json{inside}")
    if job.checkpoint.folder is not None:
        print(f"      {job.checkpoint.folder.rstrip('/')}/{job.name} holds the checkpoints and copies of these files")
    if finished.sample:
        print(f"\nsample:\n{finished.sample}")
