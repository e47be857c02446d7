"""`forerun train`: run a job to its end, or go on where it stopped."""

from __future__ import annotations

import argparse
import sys

from forerun.config.load import load
from forerun.units import Count, Seconds


def run(args: argparse.Namespace) -> int:
    loaded = load(args.job, args.overrides)
    sys.path.append(str(loaded.path.resolve().parent))  # a model of the user's own stands beside the job
    from forerun.loop.train import train
    from forerun.track.display import make_display

    with make_display(sys.stdout) as display:
        finished = train(loaded.job, display, fresh=args.fresh)
    summary = finished.summary
    print(
        f"\ndone: {summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f} "
        f"nats per token, {Count(summary['tokens'])} tokens in {Seconds(summary['train_seconds'])}"
        + (f" (resumed at step {summary['resumed_at']})" if summary["resumed_at"] else "")
    )
    print(f"      {loaded.job.runs}/{loaded.job.name}/ holds job.yaml, metrics.jsonl, summary.json, checkpoints/")
    if finished.sample:
        print(f"\nsample:\n{finished.sample}")
    return 0
