"""The objective of a job with a teacher."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.models.registry import model_of
from forerun.models.teacher import teacher_section
from forerun.objectives.distil import Distil


def distil_of(job: Job, chunk: int) -> Distil:
    """`chunk` is what one model's logits allow; here are those of two, unless the job itself has said how many."""
    said, student = job.distil, model_of(job.model)
    assert said is not None
    return Distil(
        chunk if job.loss_chunk else -(-chunk // 2),
        said.soft,
        said.temperature,
        teacher=model_of(teacher_section(job)) if said.cache is None else None,
        top_k=min(said.top_k, student.vocab),
        vocab=student.vocab,
        anchor=said.anchor,
        anchor_share=said.anchor_share,
        seed=job.seed,
    )
