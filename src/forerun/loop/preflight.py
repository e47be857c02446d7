"""The checks of `train` before it compiles, which takes a minute or more.

Everything that the job, the data and the run's folder decide is checked here or earlier. `forerun check` and
`forerun plan` make the checks that need no run folder (`concrete`).
"""

from __future__ import annotations

from pathlib import Path

from forerun.checkpoint.patience import Patience
from forerun.checkpoint.reader import Reader
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.enough import require_one_batch
from forerun.errors import UserError
from forerun.loop.adapter import require_adapter
from forerun.loop.given import require_weights
from forerun.models.teacher import teacher_section
from forerun.program.build import Program


def check_before_compile(job: Job, program: Program, corpus: Corpus, checkpoints: Path | str) -> None:
    """Reject what would otherwise fail after the compilation.

    That is: data that does not fill a batch, a teacher without weights, an adapter folder that does not fit, and a run
    that would resume with other data. The data of preferences is compared later: its digest includes the reference.
    """
    require_one_batch(corpus.rows, job.batch)
    if job.distil is not None and job.distil.cache is None:
        require_weights(teacher_section(job))
    reader = Reader(checkpoints, Patience())
    newest = reader.newest()
    if newest is None and job.lora is not None and job.lora.start is not None:
        require_adapter(Path(job.lora.start), job, program.model, program.method.objective.own(program.state.params))
    if newest is not None and job.preferences is None:
        require_same_data(job, corpus, newest, reader.record(newest).get("data"))


def require_same_data(job: Job, corpus: Corpus, step: int, before: object) -> None:
    """Reject other data than that of the checkpoint at `step`: a resumed run would not be the same run."""
    if before != corpus.digest:
        raise UserError(
            f"the data is not what the checkpoint of step {step} was trained on",
            why=f"{job.data.where}: digest {corpus.digest} now, {before} then",
            fix="put the text back as it was, or start over with --fresh (the old folder is kept, renamed)",
        )
