"""A job's teacher, seen as a model. Free of jax."""

from __future__ import annotations

from forerun.config.schema import Job, Model


def teacher_section(job: Job) -> Model:
    """The teacher as if it were the job's model."""
    assert job.distil is not None
    return Model(name=job.distil.teacher, revision=job.distil.revision)
