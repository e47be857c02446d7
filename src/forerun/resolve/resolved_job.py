"""`ResolvedJob`: a job whose open values are filled in. It is the step between the job file and the Program.

Every command gets it from `forerun.resolve.resolve_model.resolve_model`, which reads no data. `with_data` adds the
values that follow from the data. `export`, `eval` and `generate` construct it directly, because the job of a run was
resolved before it was written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape, check_experts, check_model
from forerun.models.families.base import Config
from forerun.models.model_facts import ModelFacts, ModelOutline, teacher_section
from forerun.models.sizes import HUB_NAMES
from forerun.resolve.derive import GIVEN, Derived, derive
from forerun.resolve.tokenizer_checks import compares_without_data, require_same_tokenizer, require_vocab

if TYPE_CHECKING:
    from forerun.data.corpus import Corpus
    from forerun.models.base import Model


@dataclass(frozen=True)
class ResolvedJob:
    """A job with its steps, vocabulary and revisions filled in.

    Attributes:
      job: the job as written, with the open values filled in.
      base: the outline of the model, if it does not exist yet: the result of a stage before.
      written: the job as the user wrote it, or None for a job that was resolved earlier. It is ignored in comparisons.
      steps_reason: where the number of steps comes from, for the user. It is ignored in comparisons.
    """

    job: Job
    base: ModelOutline | None = None
    written: Job | None = field(default=None, compare=False, repr=False)
    steps_reason: str = field(default=GIVEN, compare=False)

    @cached_property
    def model_facts(self) -> ModelFacts:
        """The facts about the job's own model."""
        return ModelFacts(self.job.model, self.base)

    @cached_property
    def teacher(self) -> ModelFacts | None:
        """The facts about the teacher, or None if the job has no teacher."""
        return None if self.job.method.teacher is None else ModelFacts(teacher_section(self.job))

    @property
    def step_teacher(self) -> ModelFacts | None:
        """The teacher that runs in every step. None if the job has no teacher or its logits are cached."""
        return self.teacher if self.job.method.runs_teacher else None

    @property
    def steps(self) -> int:
        """The number of steps."""
        assert self.job.steps is not None, "`with_data` fills in the steps of a job with epochs"
        return self.job.steps

    @property
    def config(self) -> Config | None:
        """The dimensions of the model, or None for a custom class."""
        return self.model_facts.config

    @property
    def vocab(self) -> int:
        """The size of the model's vocabulary."""
        return self.model_facts.vocab

    @property
    def model(self) -> Model:
        """The model object. Imports jax."""
        return self.model_facts.model

    @property
    def starting_weights(self) -> str:
        """A line for the user about the weights that a new run starts with."""
        name = self.job.model.name
        if self.model_facts.is_checkpoint:
            return f"weights of {name}"
        pretrained = f"; the pretrained model is model={HUB_NAMES[name]}" if name in HUB_NAMES else ""
        return f"random weights (seed {self.job.seed}): trains from scratch{pretrained}"

    def with_data(self, corpus: Corpus) -> ResolvedJob:
        """Return the job with the steps that follow from its epochs.

        Raises:
          UserError: the tokenizer of the data is not that of the teacher or has more ids than the model's vocabulary,
            or the data is smaller than a batch.
        """
        from forerun.data.order.batches import require_one_batch  # imports jax, which a plan of a named model avoids

        teacher = self.step_teacher
        if teacher is not None and not compares_without_data(self.job, self.model_facts, teacher):
            require_same_tokenizer(teacher, corpus.tokenizer)
        require_vocab(corpus.tokenizer, self.vocab)
        require_one_batch(corpus.rows, self.job.batch)
        if self.job.steps is not None:
            return self
        derived = derive(self.job, MeshShape(1, 1, 1), corpus.rows.epoch)  # steps do not depend on the mesh
        return replace(self.with_values(steps=derived.steps, epochs=None), steps_reason=derived.reasons["steps"])

    def derived(self, shape: MeshShape, rows: int | None = None) -> Derived:
        """Return the numbers that follow from the job on a mesh, such as the micro-batch. Does not import jax.

        Args:
          shape: the mesh. The heads of a custom class are not checked against it: see `require_mesh`.
          rows: rows of an epoch, or None if the data was not read.

        Raises:
          UserError: the batch or the heads cannot be split over the mesh.
        """
        job = self.job
        check_model(shape, self.model_facts.heads, job.batch, job.micro_batch)
        self._check_experts(shape)
        derived = derive(job, shape, rows)
        return replace(derived, reasons={**derived.reasons, "steps": self.steps_reason})

    def require_mesh(self, shape: MeshShape) -> None:
        """Raise if the batch, the heads or the sequences of the model cannot be split over the mesh. Imports jax."""
        from forerun.models.base import require_split_sequences

        check_model(shape, self.model.heads, self.job.batch, self.job.micro_batch)
        require_split_sequences(self.model, shape.context)
        if self.teacher is not None:
            require_split_sequences(self.teacher.model, shape.context)

    def _check_experts(self, shape: MeshShape) -> None:
        if shape.expert == 1:
            return
        experts = self.model_facts.experts
        check_experts(shape, None if experts is None else experts.count, "the model")
        if self.teacher is not None and self.teacher.experts is not None:
            check_experts(shape, self.teacher.experts.count, "the teacher")

    def with_values(self, **values: Any) -> ResolvedJob:
        """Return a copy with other values at these keys of the job, such as `mesh` or `remat`."""
        return replace(self, job=self.job.model_copy(update=values))
