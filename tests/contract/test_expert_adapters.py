"""Adapters of experts as PEFT folders: PEFT adapts the parameters of transformers that hold all experts of a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_reference import (
    checkpoint,
    job_in,
    peft_start,
    rest_as,
    torch_logits,
    torch_losses,
    torch_model,
    trained,
)
from safetensors.numpy import load_file
from test_experts import EXPERTS
from test_lora_steps import IDS, our_logits

from forerun.errors import UserError
from forerun.verbs.export.export import export

# PEFT looks for the keys of rank_pattern only among modules, and warns about those of parameters, which it applies.
UNMATCHED = "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning", UNMATCHED)]

FEW = {"num_experts_per_tok": 2, "intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, **FEW},
    "Olmoe": {"num_experts": 8, **FEW},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8, **FEW},
}


@pytest.mark.slow
def test_twenty_steps_of_quantized_experts_follow_peft(tmp_path: Path) -> None:
    """The first adapters are those of PEFT, on one parameter of the experts and on the attention."""
    import peft

    base = checkpoint(tmp_path / "base", "Qwen3Moe", **FAMILIES["Qwen3Moe"])
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    first = peft_start(base, tmp_path / "first", r=4, lora_alpha=16, **targets)
    lora = "{rank: 4, base: nf4, block: 16, targets: [q_proj, down_proj], start: first}"
    job = job_in(tmp_path, lora, "experts.balance_loss=0")
    rows = trained(job)
    model = peft.PeftModel.from_pretrained(rest_as(torch_model(base), "nf4", 16), first, is_trainable=True)
    expected = torch_losses(model, job, [row["lr"] for row in rows])
    assert expected[0] - expected[-1] > 0.2
    np.testing.assert_allclose([row["loss"] for row in rows], expected, rtol=1e-4)
    export(str(tmp_path / "runs" / "run"), str(tmp_path / "peft"))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj"]
    assert config["target_modules"] == ["self_attn.q_proj"]
    again = peft.PeftModel.from_pretrained(rest_as(torch_model(base), "nf4", 16), tmp_path / "peft")
    np.testing.assert_allclose(torch_logits(again, IDS), our_logits(tmp_path / "runs" / "run"), atol=1e-4)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "GptOss" else pytest.mark.slow) for name in FAMILIES]
)
def test_peft_computes_the_logits_of_the_run(family: str, tmp_path: Path) -> None:
    """All matrices and the routers have adapters. A second run starts from the folder and exports it again."""
    import peft

    base = checkpoint(tmp_path / "base", family, **FAMILIES[family])
    lora = "rank: 4, base: float32, targets: [all-linear, router]"
    trained(job_in(tmp_path, f"{{{lora}}}"))
    run, folder = tmp_path / "runs" / "run", tmp_path / "peft"
    assert "bit for bit" in export(str(run), str(folder)).proof
    model = peft.PeftModel.from_pretrained(torch_model(base), folder)
    before = torch_logits(torch_model(base), IDS)
    after = torch_logits(model, IDS)
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, our_logits(run), atol=1e-4)
    names = {name for name, _ in model.named_parameters() if ".lora_A." in name and ".layers.0." in name}
    router = "router" if family == "GptOss" else "gate"
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", router, "experts", "experts.base_layer"}
    assert {name.partition(".lora_A")[0].rpartition("self_attn." if "self_attn" in name else "mlp.")[2] for name in
            names} == kinds  # fmt: skip

    job = job_in(tmp_path, f"{{{lora}, start: ./peft}}", "name=second", "optimizer.lr=1e-30", "steps=1")
    trained(job)
    export(str(tmp_path / "runs" / "second"), str(tmp_path / "again"))
    one, other = (load_file(where / "adapter_model.safetensors") for where in (folder, tmp_path / "again"))
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, atol=1e-12, err_msg=name)


def test_a_folder_with_other_experts_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", "Qwen3Moe", **FAMILIES["Qwen3Moe"])
    peft_start(base, tmp_path / "first", r=4, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(UserError) as raised:
        trained(job_in(tmp_path, "{rank: 4, targets: [gate_proj, down_proj], start: first}"))
    assert raised.value.code == "E-RUN-004"
    assert "gate_up_proj" in raised.value.why
