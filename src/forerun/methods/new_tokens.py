"""New tokens of a pretrained model as a transform of specs: its embedding and its read-out matrix get new rows.

Without adapters, the complete resized matrices are trained. With adapters, the old rows stay frozen and only the new
rows are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.nn import spec
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import Dense, Extended, is_weight, mean_rows, with_rows
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class NewTokensTransform:
    """The transform for `model.new_tokens`.

    Attributes:
      count: the number of new tokens.
      first: the id of the first of them. The others follow.
      old: the number of rows in the model's files.
      dtype: the dtype of the new rows.
      freezes: whether the old rows are frozen, because the job trains adapters.
    """

    count: int
    first: int
    old: int
    dtype: str
    freezes: bool

    def reads(self, specs: Tree) -> Tree:
        """Return the specs in which files are read: the matrices have their old number of rows."""
        return _map_tables(lambda s: replace(s, shape=(self.old, *s.shape[1:])), specs)

    def specs(self, specs: Tree) -> Tree:
        """Return the specs with new rows: in the same matrix, or next to a frozen one."""
        if not self.freezes:
            rows = max(self.old, self.first + self.count)
            return _map_tables(lambda s: replace(s, shape=(rows, *s.shape[1:])), specs)

        def leaf(weight: Any) -> Any:
            if not _is_table(weight):
                return weight
            base = _value(weight)
            rows = ParamSpec(
                (self.count, *base.shape[1:]), f"N{base.axes[1:]}", base.init, jnp.dtype(self.dtype), inputs=base.inputs
            )
            return Extended(base=base, rows=rows, first=self.first, is_embedding=not isinstance(weight, Dense))

        return jax.tree.map(leaf, specs, is_leaf=_is_leaf)

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return `params` with new rows, each of which is the mean of the old ones."""

        def leaf(before: Any, weight: Any) -> Any:
            if not _is_table(before):
                return weight
            table = weight.value if isinstance(weight, Dense) else weight
            if self.freezes:
                rows = mean_rows(table, self.count, self.dtype)
                return Extended(base=table, rows=rows, first=self.first, is_embedding=not isinstance(weight, Dense))
            whole = with_rows(table, mean_rows(table, self.count, table.dtype), self.first)
            return Dense(whole) if isinstance(weight, Dense) else whole

        return jax.tree.map(leaf, specs, params, is_leaf=_is_leaf)


def new_tokens_transform(resolved: ResolvedJob) -> NewTokensTransform | None:
    """Return the transform of a resolved job, or None if it adds no tokens."""
    section, checkpoint = resolved.job.model, resolved.model_facts.checkpoint
    if not section.added_tokens:
        return None
    assert checkpoint is not None, "`resolve_model` rejects new tokens of other models"
    assert section.first_new_token is not None, "`resolve_model` fills in the ids of new tokens"
    return NewTokensTransform(
        count=len(section.added_tokens),
        first=section.first_new_token,
        old=checkpoint.config.vocab,
        dtype=resolved.job.precision.params,
        freezes=resolved.job.method.trains_adapters,
    )


def _map_tables(function: Any, specs: Tree) -> Tree:
    def leaf(weight: Any) -> Any:
        return spec.map_specs(function, weight) if _is_table(weight) else weight

    return jax.tree.map(leaf, specs, is_leaf=_is_leaf)


def _is_leaf(value: object) -> bool:
    return is_weight(value) or spec.is_spec(value)


def _value(weight: Any) -> Any:
    return weight.value if isinstance(weight, Dense) else weight


def _is_table(weight: Any) -> bool:
    """Return whether a spec is the embedding or the read-out matrix: it has one row per token."""
    value = _value(weight)
    return isinstance(value, ParamSpec) and value.axes.startswith("V")
