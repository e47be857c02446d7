"""The job's training method: its objective and the transforms of the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from forerun.methods.lora import LoraTransform
from forerun.methods.new_tokens import NewTokensTransform, new_tokens_transform
from forerun.methods.qat import QatTransform, kept_rounding
from forerun.methods.requirements import require_eight_bits, require_experts, router_losses
from forerun.models.base import Model
from forerun.nn import spec
from forerun.nn.spec import Tree, is_spec
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.lowrank import is_experts
from forerun.nn.weights.quantized import Quantized, quantized
from forerun.objectives.base import Objective, custom_objective
from forerun.objectives.distil import Distil
from forerun.objectives.next_token import NextToken
from forerun.objectives.preference import Preference
from forerun.resolve.resolved_job import ResolvedJob

MODEL = "model"  # the name of the job's model among the trees that are read from files


class Transform(Protocol):
    """A transform of a model's specs and arrays to other leaf types."""

    def reads(self, specs: Tree) -> Tree:
        """Return the specs in which the model's files are read: in the form and dtype that the run holds."""

    def specs(self, specs: Tree) -> Tree:
        """Return the specs that a run holds, with other leaf types and the flags `trainable` and `saved`."""

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return arrays for `self.specs(specs)`.

        Args:
            specs: The specs before this transform.
            params: Arrays for `specs`.
            given: Other trees that were read from files, by name.
            key: A random key for new parameters.
        """


@dataclass(frozen=True)
class Method:
    """The objective and the transforms of a job. The transforms apply in their order."""

    objective: Objective
    transforms: tuple[Transform, ...] = ()
    drops: bool = False  # whether a step uses dropout and needs a random key

    @property
    def resizes(self) -> bool:
        """Whether the run holds larger matrices than the model's files, because of new tokens."""
        return any(isinstance(one, NewTokensTransform) and not one.freezes for one in self.transforms)

    def reads(self, specs: Tree) -> Tree:
        """Return the specs in which the model's files are read."""
        return reduce(lambda made, transform: transform.reads(made), self.transforms, specs)

    def fresh(self, specs: Tree, key: jax.Array) -> Tree:
        """Return random initial weights in the form of `self.reads(specs)`, for a model without files."""

        def leaf(wanted: Any, weight: Any) -> Any:
            if isinstance(wanted, Quantized):
                return quantized(weight.value, wanted)
            return jax.tree.map(lambda s, x: x.astype(s.dtype), wanted, weight, is_leaf=is_spec)

        made = spec.initial(specs, key)
        return jax.tree.map(leaf, self.reads(specs), made, is_leaf=lambda x: is_weight(x) or is_spec(x))

    def specs(self, specs: Tree) -> Tree:
        """Return the specs that a run holds, given the model's specs."""
        specs = self.reads(specs)
        return self.objective.specs(reduce(lambda made, transform: transform.specs(made), self.transforms, specs))

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return arrays for `self.specs(specs)`, from the model's arrays and other trees that were read from files.

        Args:
            specs: The model's specs.
            params: Arrays for `self.reads(specs)`.
            given: Other trees that were read from files, by name, for example an adapter or a teacher.
            key: A random key for new parameters.
        """
        return self.objective.start(self.dressed(specs, params, given, key), given)

    def dressed(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return the model's arrays with the leaf types of the transforms, without the objective's additions."""
        specs = self.reads(specs)
        for transform in self.transforms:
            specs, params = transform.specs(specs), transform.start(specs, params, given, key)
        return params

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """Return the FLOPs per token of a training step.

        A frozen matrix needs no gradient, so it counts 4 per element instead of 6. An adapter counts 6. Of experts and
        their adapters, those count that a token uses.
        """
        before, after = model.specs(), self.objective.own(self.specs(model.specs()))
        return self.objective.flops_per_token(model, sequence) + sum(
            (old.share if is_experts(old) else 1.0) * (_learned_flops(new) - _learned_flops(old))
            for old, new in zip(*(jax.tree.leaves(tree, is_leaf=is_weight) for tree in (before, after)), strict=True)
            if is_weight(old)
        )


def method_of(resolved: ResolvedJob, chunk: int) -> Method:
    """Return the method of a job. `chunk` is the number of positions whose logits are in memory together."""
    require_experts(resolved)
    require_eight_bits(resolved)
    job, names = resolved.job, resolved.model_facts.module_names
    objective = objective_of(resolved, chunk)
    transforms: list[Transform] = []
    if job.qat is not None:
        transforms.append(QatTransform(job.qat, names, kept_rounding(resolved), rests=job.lora is not None))
    if job.lora is not None:
        transforms.append(LoraTransform(job.lora, job.precision.params, names))
    if (added := new_tokens_transform(resolved)) is not None:
        transforms.append(added)
    return Method(objective, tuple(transforms), drops=job.lora is not None and job.lora.dropout > 0)


def objective_of(resolved: ResolvedJob, chunk: int) -> Objective:
    """Return the objective of a job. `chunk` is the number of positions whose logits are in memory together."""
    job = resolved.job
    if job.objective is not None:
        return custom_objective(job.objective, chunk)
    if job.distil is not None:
        return distil_of(resolved, chunk)
    if job.preferences is not None:
        p = job.preferences
        reference = p.reference_with(adapters=job.lora is not None)
        return Preference(chunk, p.loss, p.beta, p.wrong_share, reference, job.precision.compute)
    return NextToken(chunk, router_losses(resolved))


def _learned_flops(weight: Any) -> float:
    """Return the FLOPs per token that depend on the method.

    These are 2 per trainable element for its gradient, and 4 more per element that is not in the model's own matrix.
    """
    leaves = jax.tree.leaves(weight, is_leaf=is_spec)
    base = getattr(weight, "base", None)
    own = set(map(id, jax.tree.leaves(base, is_leaf=is_spec))) if base is not None else set(map(id, leaves))
    learned = sum(2.0 * leaf.size for leaf in leaves if leaf.trainable)
    return learned + sum(4.0 * leaf.size for leaf in leaves if id(leaf) not in own)


def distil_of(resolved: ResolvedJob, chunk: int) -> Distil:
    """Return the objective for distillation.

    `chunk` is sized for the logits of one model. Teacher and student need twice the memory, so it is halved, unless the
    job sets `loss_chunk`.
    """
    job, distil, teacher = resolved.job, resolved.job.distil, resolved.step_teacher
    assert distil is not None
    return Distil(
        chunk if job.loss_chunk else -(-chunk // 2),
        distil.soft,
        distil.temperature,
        teacher=None if teacher is None else teacher.model,
        top_k=min(distil.top_k, resolved.model.vocab),
        vocab=resolved.model.vocab,
        anchor=distil.anchor,
        anchor_share=distil.anchor_share,
        seed=job.seed,
    )


# ---- Specs of a job, without a program ----


def model_specs(resolved: ResolvedJob) -> Tree:
    """Return the specs of the model's own parameters, in the dtype of the job."""
    return spec.cast(resolved.model.specs(), jnp.dtype(resolved.job.precision.params))


def run_specs(resolved: ResolvedJob) -> Tree:
    """Return the specs of all parameters of a run: those of the model, as changed by the method."""
    return method_of(resolved, chunk=1).specs(model_specs(resolved))


def parameter_count(resolved: ResolvedJob) -> int:
    """Return the number of the model's own parameters, without adapters and companion models."""
    return spec.count(model_specs(resolved))


def trainable_count(resolved: ResolvedJob) -> int:
    """Return the number of parameters that the optimizer updates."""
    return sum(leaf.size for leaf in jax.tree.leaves(run_specs(resolved), is_leaf=is_spec) if leaf.trainable)
