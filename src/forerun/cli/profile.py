"""`forerun profile`: record a few steps of a job with the JAX profiler, without a run."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    """Record the steps, and print the summary and where the trace is."""
    from forerun.cli.options.job_warnings import print_warnings
    from forerun.cli.options.stage_choice import chosen_stages, require_one
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.job_files import load_job
    from forerun.verbs.profile.profile import profile

    stages = chosen_stages(args)
    require_one(stages, "forerun profile")
    job = stages[0].job if stages else load_job(args.job, *args.overrides)
    print_warnings(resolve_model(job))
    recorded = profile(job, steps=args.steps, warmup=args.warmup, to=args.to)
    print(f"\n{recorded.text}")
    if recorded.trace is not None:
        print(f"  Perfetto:    open {recorded.trace} at https://ui.perfetto.dev")
    print(f"  TensorBoard: tensorboard --logdir {recorded.folder}")
    return 0
