"""Layers and parameters that have adapters, in models whose layers differ, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hybrid_specs import NAMES, E, F, H, specs, stacks

from forerun.config.load import load
from forerun.config.training_method import Lora
from forerun.methods.lora import LoraTransform
from forerun.methods.target_matches import TargetCoverage, TargetMatch, layer_numbers, target_coverage
from forerun.verbs.check.check import check_loaded

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
