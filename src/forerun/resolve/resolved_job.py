"""`ResolvedJob`: a job whose open values are filled in. It is the step between the job file and the Program.

`check`, `plan`, `train` and `cache` get it from `forerun.inputs.resolve_job.resolve`, which opens the data and the
checkpoints if necessary. `export`, `eval` and `generate` construct it directly, because the job of a run was resolved
before it was written. `resolve` is in a higher layer than this type: it imports the data, which `planner` may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape, check_experts, check_model
from forerun.models.families.base import Config
from forerun.models.pretrained import teacher_section
from forerun.program.derive import GIVEN, Derived, derive
from forerun.resolve.model_facts import ModelFacts

if TYPE_CHECKING:
    from forerun.methods.method import Method
    from forerun.models.base import Model
    from forerun.nn.spec import Tree
    from forerun.program.build import Program
    from forerun.program.kernels import AttentionChoice
    from forerun.program.recording import Recording


@dataclass(frozen=True)
class ResolvedJob:
    """A job with its steps, vocabulary and revisions filled in.

    Attributes:
      job: the job as written, with the open values filled in.
      steps_reason: where the number of steps comes from, for the user. It is ignored in comparisons.
    """

    job: Job
    steps_reason: str = field(default=GIVEN, compare=False)

    @cached_property
    def model_facts(self) -> ModelFacts:
        """The facts about the job's own model."""
        return ModelFacts(self.job.model)

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
        assert self.job.steps is not None, "`resolve` fills in the steps"
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

    @cached_property
    def method(self) -> Method:
        """The method, for its specs only: its loss has a placeholder chunk of 1. Imports jax."""
        from forerun.methods.method import method_of

        return method_of(self.job, chunk=1)

    @cached_property
    def model_specs(self) -> Tree:
        """The specs of the model's own parameters, in the dtype of the job. Imports jax."""
        import jax.numpy as jnp

        from forerun.nn.spec import cast

        return cast(self.model.specs(), jnp.dtype(self.job.precision.params))

    @cached_property
    def specs(self) -> Tree:
        """The specs of all parameters of a run: those of the model, as changed by the method. Imports jax."""
        return self.method.specs(self.model_specs)

    @cached_property
    def parameters(self) -> int:
        """The number of the model's own parameters, without adapters and companion models. Imports jax."""
        from forerun.nn.spec import count

        return count(self.model_specs)

    @cached_property
    def trainable_parameters(self) -> int:
        """The number of parameters that the optimizer updates. Imports jax."""
        import jax

        from forerun.nn.spec import is_spec

        return sum(one.size for one in jax.tree.leaves(self.specs, is_leaf=is_spec) if one.trainable)

    def attention(self, platform: str, device_kind: str, capability: tuple[int, int] | None = None) -> AttentionChoice:
        """Return the attention kernel of the Program on this kind of device, and why. Imports jax."""
        from forerun.program.kernels import job_attention

        return job_attention(self.job, self.model, platform, device_kind, capability)

    def loss_chunk(self, derived: Derived, device_kind: str) -> int:
        """Return how many positions have logits in memory at one time on this kind of device. Imports jax."""
        from forerun.program.build import loss_chunk

        return loss_chunk(self.job, self.model, derived, device_kind)

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
        found = derive(job, shape, rows)
        return replace(found, reasons={**found.reasons, "steps": self.steps_reason})

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
        check_experts(shape, self.model_facts.experts, "the model")
        if self.teacher is not None and self.teacher.experts is not None:
            check_experts(shape, self.teacher.experts, "the teacher")

    def program(self, shape: MeshShape, devices: Sequence[Any], rows: int | None = None) -> Program:
        """Return the Program on `devices`, which may be real or those of a topology description. Imports jax."""
        from forerun.program.build import build, make_mesh

        self.require_mesh(shape)
        return build(self.job, self.model, make_mesh(shape, devices), self.derived(shape, rows))

    def recording(self, shape: MeshShape, devices: Sequence[Any]) -> Recording:
        """Return the program of `forerun cache` on `devices`: a forward pass of the teacher. Imports jax."""
        from forerun.program.build import make_mesh
        from forerun.program.recording import build_recording

        assert self.teacher is not None
        return build_recording(self.job, self.teacher.model, self.vocab, make_mesh(shape, devices), shape)

    def with_values(self, **values: Any) -> ResolvedJob:
        """Return a copy with other values at these keys of the job, such as `mesh` or `remat`."""
        return replace(self, job=self.job.model_copy(update=values))
