"""The layers and parameters that the targets of a job match, for `check`, `plan` and `train`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from forerun.methods.lora import TARGETS_KEY
from forerun.methods.method import method_of
from forerun.methods.targets import linear_paths, module_name
from forerun.models.keys import Stack, path_text
from forerun.nn.spec import Tree, count, is_spec
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class TargetMatch:
    """The matrices with one module name that have adapters."""

    name: str  # of the module in transformers, "q_proj"
    layers: int  # layers in which it has an adapter; 0 for a matrix outside the layers
    trainable: int  # parameters of the adapters
    matrices: int  # parameters of the matrices themselves

    @property
    def share(self) -> float:
        """The parameters of the adapters per parameter of the matrices."""
        return self.trainable / self.matrices


@dataclass(frozen=True)
class TargetCoverage:
    """All matrices with adapters, and the layers without any."""

    matches: tuple[TargetMatch, ...]
    layers: int  # of the model
    bare: tuple[int, ...]  # numbers of the layers without an adapter
    others: tuple[str, ...]  # module names of the matrices in these layers

    @property
    def warning(self) -> str | None:
        """A warning if a layer has no adapter, or None."""
        if not self.bare:
            return None
        return (
            f"{TARGETS_KEY} matches nothing in {len(self.bare)} of {self.layers} layers, which learn nothing; "
            f"the matrices of these layers are {', '.join(self.others)}"
        )


def job_coverage(resolved: ResolvedJob) -> TargetCoverage | None:
    """Return the layers and parameters that have adapters, or None for a job without LoRA.

    The specs are those that `plan` compiles and `train` trains. A custom model has no numbered layers.

    Raises:
        UserError: A target matches no matrix.
    """
    if resolved.job.method.adapter is None:
        return None
    model, method = resolved.model, method_of(resolved, chunk=1)
    adapted = method.objective.own(method.specs(model.specs()))
    return target_coverage(model.specs(), adapted, resolved.model_facts.module_names, getattr(model, "stacks", ()))


def target_coverage(model: Tree, adapted: Tree, names: Mapping[str, str], stacks: Sequence[Stack]) -> TargetCoverage:
    """Return the layers and parameters that have adapters.

    Args:
        model: The model's own specs.
        adapted: The specs with adapters, which LoRA returns for `model`.
        names: The path of each weight in the family's table, with its name in transformers.
        stacks: The stacks of the model's layers.
    """
    flat = jax.tree_util.tree_leaves_with_path(adapted, is_leaf=is_weight)
    adapters = {path_text(path): leaf for path, leaf in flat if isinstance(leaf, LowRank)}
    sizes = _sizes(model)
    modules: dict[str, list[str]] = {}
    for path in adapters:
        modules.setdefault(module_name(path, names), []).append(path)
    matches = tuple(
        TargetMatch(
            name,
            len({number for path in paths for number in layer_numbers(path, stacks)}),
            sum(_trainable(adapters[path]) for path in paths),
            sum(sizes[path] for path in paths),
        )
        for name, paths in modules.items()
    )
    every = {number for stack in stacks for number in stack.numbers}
    bare = every - {number for path in adapters for number in layer_numbers(path, stacks)}
    inside = [path for path in linear_paths(model) if bare & set(layer_numbers(path, stacks))]
    others = tuple(dict.fromkeys(module_name(path, names) for path in inside))
    return TargetCoverage(matches, len(every), tuple(sorted(bare)), others)


def layer_numbers(path: str, stacks: Sequence[Stack]) -> tuple[int, ...]:
    """Return the numbers of the layers in the stack of a parameter, or none for a parameter outside the layers."""
    inside = [stack for stack in stacks if path.startswith(f"{stack.name}.")]
    return tuple(max(inside, key=lambda stack: len(stack.name)).numbers) if inside else ()


def _sizes(model: Tree) -> dict[str, int]:
    flat = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_weight)
    return {path_text(path): count(leaf) for path, leaf in flat}


def _trainable(weight: Any) -> int:
    return sum(math.prod(one.shape) for one in jax.tree.leaves(weight, is_leaf=is_spec) if one.trainable)
