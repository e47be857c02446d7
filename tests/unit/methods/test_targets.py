"""Target names: those of public adapters, in models whose layers differ.

Layers and parameters that have adapters, in models whose layers differ, counted by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import assert_error
from hybrid_specs import NAMES, E, F, H, specs, stacks

from forerun.config.load import load
from forerun.config.training_method import Lora
from forerun.errors import UserError
from forerun.methods.lora import LoraTransform
from forerun.methods.target_matches import TargetCoverage, TargetMatch, layer_numbers, target_coverage
from forerun.methods.targets import chosen_paths
from forerun.verbs.check.check import check_loaded

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


R = 3


def coverage(*targets: str, dora: bool = False) -> TargetCoverage:
    transform = LoraTransform(Lora(rank=R, targets=targets, dora=dora), "float32", NAMES)
    return target_coverage(specs(), transform.specs(specs()), NAMES, stacks())


def test_layers_and_parameters_of_every_target() -> None:
    found = {match.name: match for match in coverage("all-linear").matches}
    assert found == {
        "q_proj": TargetMatch("q_proj", 2, 2 * R * (E + H), 2 * E * H),
        "in_proj_qkv": TargetMatch("in_proj_qkv", 7, 7 * R * (E + H), 7 * E * H),
        "out_proj": TargetMatch("out_proj", 7, 7 * R * (H + E), 7 * H * E),
        "down_proj": TargetMatch("down_proj", 9, 9 * R * (F + E), 9 * F * E),
    }
    assert coverage("all-linear").warning is None
    with_lengths = coverage("q_proj", dora=True).matches[0]
    assert with_lengths.trainable == 2 * (R * (E + H) + H)


def test_layers_without_an_adapter_are_counted_and_their_matrices_are_named() -> None:
    found = coverage("q_proj")
    assert (found.layers, found.bare) == (9, (0, 1, 2, 4, 5, 6, 8))
    assert found.others == ("in_proj_qkv", "out_proj", "down_proj")
    text = found.warning or ""
    assert "7 of 9" in text
    assert "in_proj_qkv" in text
    assert coverage("q_proj", "in_proj_qkv").bare == ()
    assert coverage("down_proj").bare == ()


def test_a_matrix_outside_the_layers_covers_no_layer() -> None:
    found = coverage("per_layer_model_projection")
    assert found.matches == (TargetMatch("per_layer_model_projection", 0, R * (E + F), E * F),)
    assert len(found.bare) == 9
    assert layer_numbers("embed", stacks()) == ()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("[q_proj, mlp.up_proj]", {"q_proj", "up_proj"}),
    ],
)
def test_check_prints_layers_and_parameters(targets: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play. " * 50)
    (tmp_path / "job.yaml").write_text(
        "model: {layers: 3, embed: 32, heads: 4, kv_heads: 2, mlp: 48, vocab: 257}\nsequence: 16\nbatch: 2\nsteps: 1\n"
        f"data: {{path: {tmp_path / 'text.txt'}, tokenizer: bytes}}\nlora: {{rank: 4, targets: {targets}}}\n"
    )
    report = check_loaded(load(tmp_path / "job.yaml", []), "v5e-1")
    assert report.error is None
    rows = {row.name.removeprefix("target "): row for row in report.groups[-1].rows if row.name.startswith("target ")}
    assert set(rows) == expected
    assert {row.value for row in rows.values()} == {"3 of 3 layers"}
    trainable, matrix = 3 * 4 * (32 + 48), 3 * 32 * 48
    assert f"{100 * trainable / matrix:.3g} %" in rows["up_proj"].origin
