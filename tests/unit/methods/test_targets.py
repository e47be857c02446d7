"""Target names: those of public adapters, in models whose layers differ."""

from __future__ import annotations

import pytest
from error_assertions import assert_error
from hybrid_specs import NAMES, specs

from forerun.errors import UserError
from forerun.methods.targets import chosen_paths

QUERY = {"blocks.full.query"}
DELTA_IN = {"blocks.linear.delta_in", "tail.linear.delta_in"}
DELTA_OUT = {"blocks.linear.delta_out", "tail.linear.delta_out"}
DOWN = {"blocks.full.down", "blocks.linear.down", "tail.linear.down"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("q_proj", QUERY),
        ("in_proj_qkv", DELTA_IN),
        ("delta_in", DELTA_IN),
        ("linear_attn.out_proj", DELTA_OUT),  # the form in which adapter_config.json names it
        ("linear_attn.*", DELTA_IN | DELTA_OUT),
        ("down_proj", DOWN),
        ("blocks.full.*", QUERY | {"blocks.full.down"}),
        ("blocks.down", DOWN),
        ("model.layers.*.mlp.*", DOWN),
        ("all-linear", QUERY | DELTA_IN | DELTA_OUT | DOWN),
        ("per_layer_model_projection", {"layer_projection"}),
    ],
)
def test_a_target_matches_its_module_in_all_stacks(target: str, expected: set[str]) -> None:
    assert chosen_paths(specs(), [target], NAMES, "lora.targets", optional=("layer_projection",)) == expected


def test_all_linear_has_optional_matrices_only_if_they_are_named() -> None:
    paths = chosen_paths(
        specs(), ["all-linear", "layer_projection"], NAMES, "lora.targets", optional=("layer_projection",)
    )
    assert "layer_projection" in paths
    assert "layer_projection" in chosen_paths(specs(), ["all-linear"], NAMES, "qat.targets")


@pytest.mark.parametrize(
    ("target", "nearest"),
    [("in_proj_qkvz", "in_proj_qkv"), ("qproj", "q_proj"), ("mlp.down_prj", "down_proj"), ("proj", "q_proj")],
)
def test_an_unknown_target_is_rejected_with_the_nearest_names(target: str, nearest: str) -> None:
    with pytest.raises(UserError) as refused:
        chosen_paths(specs(), ["q_proj", target], NAMES, "lora.targets")
    assert_error(refused.value, "E-METHOD-003", what=repr(target), why="in_proj_qkv", fix=nearest)


@pytest.mark.parametrize("target", ["norm", "embed", "xyz", "layers"])
def test_a_parameter_that_is_no_matrix_is_no_target(target: str) -> None:
    with pytest.raises(UserError) as refused:
        chosen_paths(specs(), [target], NAMES, "lora.targets")
    assert_error(refused.value, "E-METHOD-003", what=repr(target), fix="all-linear")
