"""The job's method: what is to become small, and what stands in the place of the model's weights meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import jax

from forerun.config.schema import Job
from forerun.methods.distil import distil_of
from forerun.methods.kept import kept_rounding
from forerun.methods.lora import LoraTransform
from forerun.methods.names import module_names
from forerun.methods.qat import QatTransform
from forerun.models.base import Model
from forerun.nn import spec
from forerun.nn.quantized import Quantized, quantized
from forerun.nn.spec import Tree, is_spec
from forerun.nn.weights import is_weight
from forerun.objectives.base import Objective
from forerun.objectives.next_token import NextToken
from forerun.objectives.preference import Preference
from forerun.objectives.registry import own_objective

MODEL = "model"  # the name of the job's own model among what is read from files


class Transform(Protocol):
    """From specs to specs, and the same for arrays."""

    def reads(self, specs: Tree) -> Tree:
        """The model's own specs as its files are to be read: in the dtype that they will rest in."""

    def specs(self, specs: Tree) -> Tree:
        """Other leaf types, what learns, what is saved."""

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Arrays as `specs` says, from arrays of the specs before; `given` is what was read besides, by name."""


@dataclass(frozen=True)
class Method:
    objective: Objective
    transforms: tuple[Transform, ...] = ()
    drops: bool = False  # whether a step needs a key

    def reads(self, specs: Tree) -> Tree:
        return reduce(lambda made, transform: transform.reads(made), self.transforms, specs)

    def fresh(self, specs: Tree, key: jax.Array) -> Tree:
        """The model's first weights where no file gives them, in the form that files are read in."""

        def leaf(wanted: Any, weight: Any) -> Any:
            if isinstance(wanted, Quantized):
                return quantized(weight.value, wanted)
            return jax.tree.map(lambda s, x: x.astype(s.dtype), wanted, weight, is_leaf=is_spec)

        made = spec.initial(specs, key)
        return jax.tree.map(leaf, self.reads(specs), made, is_leaf=lambda x: is_weight(x) or is_spec(x))

    def specs(self, specs: Tree) -> Tree:
        """What a run holds, from the model's specs."""
        specs = self.reads(specs)
        return self.objective.specs(reduce(lambda made, transform: transform.specs(made), self.transforms, specs))

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Arrays for `self.specs(specs)`, from the model's arrays and what was read besides."""
        return self.objective.start(self.dressed(specs, params, given, key), given)

    def dressed(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """The model's own arrays with the leaf types of the transforms."""
        specs = self.reads(specs)
        for transform in self.transforms:
            specs, params = transform.specs(specs), transform.start(specs, params, given, key)
        return params

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """A matrix at rest has no gradient of its own: a third less. What learns beside it counts whole."""
        before, after = model.specs(), self.objective.own(self.specs(model.specs()))
        return self.objective.flops_per_token(model, sequence) + sum(
            _learned_flops(new) - _learned_flops(old)
            for old, new in zip(*(jax.tree.leaves(tree, is_leaf=is_weight) for tree in (before, after)), strict=True)
            if is_weight(old)
        )


def method_of(job: Job, chunk: int) -> Method:
    """`chunk`: positions whose logits exist at one time."""
    objective = objective_of(job, chunk)
    transforms: list[Transform] = []
    if job.qat is not None:
        given = kept_rounding(job.model, job.qat)
        transforms.append(QatTransform(job.qat, module_names(job.model), given, rests=job.lora is not None))
    if job.lora is not None:
        transforms.append(LoraTransform(job.lora, job.precision.params, module_names(job.model)))
    return Method(objective, tuple(transforms), drops=job.lora is not None and job.lora.dropout > 0)


def objective_of(job: Job, chunk: int) -> Objective:
    """What the job says is to become small."""
    if job.objective is not None:
        return own_objective(job.objective, chunk)
    if job.distil is not None:
        return distil_of(job, chunk)
    if job.preferences is not None:
        p = job.preferences
        reference = p.reference_with(adapters=job.lora is not None)
        return Preference(chunk, p.loss, p.beta, p.wrong_share, reference, job.precision.compute)
    return NextToken(chunk)


def _learned_flops(weight: Any) -> float:
    """2 per number for its gradient, and 4 more for what is not the model's own matrix."""
    leaves = jax.tree.leaves(weight, is_leaf=is_spec)
    base = getattr(weight, "base", None)
    own = set(map(id, jax.tree.leaves(base, is_leaf=is_spec))) if base is not None else set(map(id, leaves))
    learned = sum(2.0 * leaf.size for leaf in leaves if leaf.trainable)
    return learned + sum(4.0 * leaf.size for leaf in leaves if id(leaf) not in own)
