"""`forerun train`: run a job to its end, or go on where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from forerun.config.load import Loaded, load, values
from forerun.units import Count, Seconds

if TYPE_CHECKING:
    from forerun.loop.train import Finished


def run(args: argparse.Namespace) -> int:
    from forerun.supervise.channel import VARIABLE

    loaded = load(args.job, args.overrides)
    if args.supervise and VARIABLE not in os.environ:
        return _supervised(args, loaded)
    sys.path.append(str(loaded.path.resolve().parent))  # a model of the user's own stands beside the job
    from forerun.supervise.limits import STOPPED
    from forerun.supervise.worker import alone, connect

    worker = connect() or alone()
    from forerun.loop.train import train
    from forerun.track.display import make_display

    with make_display(sys.stdout) as display:
        finished = train(loaded.job, display, fresh=args.fresh, worker=worker)
    if finished is None:
        return STOPPED
    _tell(loaded, finished)
    return 0


def _tell(loaded: Loaded, finished: Finished) -> None:
    summary: dict[str, Any] = finished.summary
    print(
        f"\ndone: {summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f} "
        f"nats per token, {Count(summary['tokens'])} tokens in {Seconds(summary['train_seconds'])}"
        + (f" (resumed at step {summary['resumed_at']})" if summary["resumed_at"] else "")
    )
    print(f"      {loaded.job.runs}/{loaded.job.name}/ holds job.yaml, metrics.jsonl, summary.json, checkpoints/")
    if finished.sample:
        print(f"\nsample:\n{finished.sample}")


def _supervised(args: argparse.Namespace, loaded: Loaded) -> int:
    """This process watches; the one that trains is its child, started again when it dies or stands still."""
    from forerun.loop.folder import folder_of, set_aside
    from forerun.supervise.hosts import Hosts
    from forerun.supervise.supervisor import supervise

    folder = folder_of(loaded.job)
    if args.fresh:
        set_aside(folder)
    command = [sys.executable, "-m", "forerun.cli.main", "train", args.job, *args.overrides]
    told = json.dumps({key: str(value) for key, value in values(loaded.job).items()}, sort_keys=True)
    identity = {"job": hashlib.sha256(told.encode()).hexdigest()[:16]}
    return supervise(command, Hosts(), folder.path, identity=identity)
