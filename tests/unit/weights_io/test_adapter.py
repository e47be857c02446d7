"""Which parameters of experts have a PEFT form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.errors import UserError
from forerun.models.keys import Part, Stack, Tensor, fused, tensor
from forerun.nn.spec import Normal, ParamSpec, stack
from forerun.nn.weights.experts import Experts
from forerun.weights_io.adapter import slots_of

EXPERTS = "model.layers.{}.mlp.experts."
SPECS = {
    "blocks": {
        name: Experts(value=stack(ParamSpec(shape, axes, Normal(1.0)), 2), share=0.5)
        for name, shape, axes in (
            ("expert_gate", (4, 6, 5), "XEM"),
            ("expert_up", (4, 6, 5), "XEM"),
            ("expert_down", (4, 5, 6), "XME"),
        )
    }
}
MODEL = SimpleNamespace(stacks=(Stack("blocks", (0, 1)),), specs=lambda: SPECS)
GATE, UP, DOWN = "blocks.expert_gate", "blocks.expert_up", "blocks.expert_down"


@pytest.mark.parametrize("separate", [False, True])
def test_tensors_of_single_experts_and_of_all_experts_are_the_same_parameters(separate: bool) -> None:
    one = EXPERTS + "{expert}."
    table = (
        (
            tensor(f"{one}w1.weight", GATE, "M E"),
            tensor(f"{one}w3.weight", UP, "M E"),
            tensor(f"{one}w2.weight", DOWN, "E M"),
        )
        if separate
        else (
            fused(f"{EXPERTS}gate_up_proj", (GATE, "X M E"), (UP, "X M E"), along=1),
            tensor(f"{EXPERTS}down_proj", DOWN, "X E M"),
        )
    )
    slots = slots_of(table, MODEL, [GATE, DOWN])
    assert [(slot.name, slot.stem, slot.rows, slot.adapted, slot.experts) for slot in slots if slot.layer == 1] == [
        ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.base_layer", (5, 5), (True, False), 4),
        ("model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts", (6,), (True,), 4),
    ]
    alone = slots_of(table, MODEL, [UP])
    assert [slot.stem for slot in alone] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_another_parameter_of_experts_is_rejected() -> None:
    table = (Tensor(f"{EXPERTS}gate_proj", (Part(GATE, "X M E"),)),)
    with pytest.raises(UserError) as raised:
        slots_of(table, MODEL, [GATE])
    assert raised.value.code == "E-WEIGHTS-032"
