"""The batch of a run that may continue with fewer slices: it must divide over each number of slices.

The batch of a step is the same on fewer slices, so each device has more of its rows. It computes them in more
micro-batches of the same size, so a micro-batch needs the same memory.
"""

from __future__ import annotations

import math

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.units import Seconds


def slice_counts(job: Job, mesh: MeshShape) -> range:
    """Return the numbers of slices that the run may have, in ascending order. It is empty if the number never changes.

    Args:
      job: its `mesh.min_slices` permits fewer slices.
      mesh: the mesh of one of these numbers. The mesh within a slice is always the same.
    """
    if job.mesh.min_slices is None or job.mesh.slices is None:
        return range(0)
    counts = range(job.mesh.min_slices, job.mesh.slices + 1)
    return counts if len(counts) > 1 and mesh.slices in counts else range(0)


def common_micro_batch(job: Job, mesh: MeshShape) -> int | None:
    """Return the micro-batch for every number of slices, or None if the number never changes.

    Raises:
      UserError: the batch or the job's micro-batch does not divide for one of the numbers.
    """
    counts = slice_counts(job, mesh)
    if not counts:
        return None
    parts = mesh.data_parallel // mesh.slices
    for count in counts:
        if job.batch % (count * parts):
            step = math.lcm(*counts) * parts
            near = sorted({max(job.batch // step, 1) * step, (job.batch // step + 1) * step})
            raise UserError(
                "E-PROGRAM-020",
                f"batch={job.batch} does not divide over {count} of {job.mesh.slices} slices",
                why=f"mesh.min_slices={job.mesh.min_slices}: the run may continue with {count} slices, which have "
                f"{count * parts} data-parallel devices",
                fix=" or ".join(f"batch={value}" for value in near) + ", or another mesh.min_slices",
            )
    shares = {count: job.batch // (count * parts) for count in counts}
    common = math.gcd(*shares.values())
    if job.micro_batch is None:
        return common
    for count, share in shares.items():
        if share % job.micro_batch:
            raise UserError(
                "E-PROGRAM-021",
                f"micro_batch={job.micro_batch} does not divide the {share} sequences of a device on {count} of "
                f"{job.mesh.slices} slices",
                why=f"mesh.min_slices={job.mesh.min_slices}: the batch stays the same on {count} slices",
                fix=f"micro_batch={common}, or remove micro_batch",
            )
    return job.micro_batch


def fewer_slices_row(job: Job, mesh: MeshShape, micro_batch: int) -> tuple[str, str, str] | None:
    """Return (name, value, reason) for the user about runs with fewer slices, or None if the number never changes."""
    counts = slice_counts(job, mesh)
    if not counts:
        return None
    parts = mesh.data_parallel // mesh.slices
    steps = ", ".join(f"{job.batch // (count * parts * micro_batch)} on {count}" for count in counts)
    waits = f"a lost slice is waited for {Seconds(job.mesh.slice_wait_seconds)}"
    return "slices", f"{counts[0]} to {counts[-1]}", f"mesh.min_slices; {waits}; accumulation: {steps}"
