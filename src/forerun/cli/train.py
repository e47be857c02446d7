"""`forerun train`: run a job to its end, or go on where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.main import told
from forerun.config.load import Loaded, load, values
from forerun.models.plugin import use_job_folder
from forerun.units import Count, Seconds

if TYPE_CHECKING:
    from forerun.loop.train import Finished


def run(args: argparse.Namespace) -> int:
    from forerun.supervise.worker import alone, connect

    worker = connect(_imports)
    loaded = load(args.job, args.overrides)
    if worker is None and (args.supervise or args.host or args.leader):
        return _supervised(args, loaded)
    use_job_folder(loaded.path.parent)
    from forerun.supervise.chip import free_chip_for
    from forerun.supervise.limits import STOPPED

    if worker is None:
        free_chip_for(loaded.job.device, print)
        worker = alone()
    with worker.leaving(lambda error: told(error, sys.argv[1:])):
        from forerun.loop.train import train
        from forerun.track.display import make_display

        with make_display(sys.stdout if worker.first else open(os.devnull, "w", encoding="utf-8")) as display:
            finished = train(loaded.job, display, fresh=args.fresh, worker=worker)
    if finished is None:
        return STOPPED
    if worker.first and finished.state is not None:
        _tell(loaded, finished)
    return 0


def _imports() -> None:
    """What takes most of the time between a start and the first step."""
    importlib.import_module("forerun.loop.train")
    importlib.import_module("forerun.track.display")


def _tell(loaded: Loaded, finished: Finished) -> None:
    summary: dict[str, Any] = finished.summary
    losses = [summary["first_loss"], summary["final_loss"]]
    # There is no loss if all steps were skipped or metrics.jsonl was deleted. A loss that is not finite is null there.
    first, final = ("unknown" if loss is None else f"{loss:.4f}" for loss in losses)
    print(
        f"\ndone: {summary['steps']} steps, loss {first} -> {final} "
        f"{summary['loss_unit']}, {Count(summary['tokens'])} tokens in {Seconds(summary['train_seconds'])}"
        + (f" (resumed at step {summary['resumed_at']})" if summary["resumed_at"] else "")
    )
    job = loaded.job
    inside = ", checkpoints/" if job.checkpoint.folder is None else ""
    print(f"      {job.runs}/{job.name}/ holds job.yaml, metrics.jsonl, summary.json{inside}")
    if job.checkpoint.folder is not None:
        print(f"      {job.checkpoint.folder.rstrip('/')}/{job.name} holds the checkpoints and copies of these files")
    if finished.sample:
        print(f"\nsample:\n{finished.sample}")


def _supervised(args: argparse.Namespace, loaded: Loaded) -> int:
    """This process watches; the one that trains is its child, started again when it dies or stands still."""
    from forerun.loop.folder import folder_of, require_usable, set_aside
    from forerun.supervise.hosts import given
    from forerun.supervise.supervisor import supervise

    hosts = given(args.host, args.leader)
    require_usable(loaded.job)
    if args.fresh and hosts.leads:
        set_aside(loaded.job)
    command = [sys.executable, "-P", "-m", "forerun.cli.main", "train", args.job, *args.overrides]
    told = json.dumps({key: str(value) for key, value in values(loaded.job).items()}, sort_keys=True)
    identity = {"job": hashlib.sha256(told.encode()).hexdigest()[:16]}
    secret = Path(args.secret) if args.secret else None
    return supervise(command, hosts, folder_of(loaded.job).path, secret_file=secret, identity=identity, spare=True)
