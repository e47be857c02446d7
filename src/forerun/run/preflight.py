"""Checks of `train` before it compiles. A compilation can take a minute or more.

All errors that follow from the job, the data or the run's folder are found here or earlier. `resolve` makes the checks
that need no run folder, also for `forerun check` and `forerun plan`.
"""

from __future__ import annotations

from pathlib import Path

from forerun.checkpoint.reader import Reader
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.batches import require_one_batch
from forerun.data.tokens.exchange import PROMPT_FORMS
from forerun.errors import UserError
from forerun.inputs.base_weights import require_weights
from forerun.inputs.peft_folder import require_adapter
from forerun.program.build import Program
from forerun.resolve.resolved_job import ResolvedJob
from forerun.storage.retries import RetrySchedule


def check_before_compile(resolved: ResolvedJob, program: Program, corpus: Corpus, checkpoints: Path | str) -> None:
    """Raise a `UserError` for inputs that would otherwise fail after the compilation.

    - The data does not fill a batch.
    - The teacher has no weights.
    - The initial adapter does not match the model.
    - The run would resume with other data. Preference data is compared later, because its digest includes the results
      of the reference model.
    """
    job = resolved.job
    require_one_batch(corpus.rows, job.batch)
    if resolved.step_teacher is not None:
        require_weights(resolved.step_teacher)
    reader = Reader(checkpoints, RetrySchedule())
    newest = reader.newest()
    start = job.method.initial_adapter
    if newest is None and start is not None:
        require_adapter(Path(start), resolved, program.method.objective.own(program.state.params))
    if newest is not None and not job.method.data_is_pairs:
        require_same_data(job, corpus, newest, reader.record(newest).get("data"))


def require_same_data(job: Job, corpus: Corpus, step: int, before: object) -> None:
    """Raise unless the data is the same as that of the checkpoint at `step`, whose digest was `before`."""
    if before != corpus.digest:
        prompts = job.data.apply_template is None and any(part.source.form in PROMPT_FORMS for part in corpus.parts)
        older = "; earlier versions joined prompts as plain text, as data.apply_template=false does" if prompts else ""
        same_rows = isinstance(before, str) and before.partition(" ")[0] == corpus.digest.partition(" ")[0]
        restored = "data.shuffle" if same_rows else "data"
        raise UserError(
            "E-RUN-035",
            f"the data is not what the checkpoint of step {step} was trained on",
            why=f"{job.data.where}: digest {corpus.digest} now, {before} then",
            fix=f"restore the original {restored}, or start over with --fresh (the old folder is kept, renamed){older}",
        )
