"""The tables of docs/reference/methods.md: they match the measurements, and the tests that they name exist.

`UPDATE_DOCS=1 pytest tests/contract/test_methods_table.py` writes them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "methods.md"
BEGIN = "<!-- {}: written by tests/contract/test_methods_table.py -->\n"
END = "<!-- end of {} -->"
# The reference of each method with its tolerance, and the test that compares them.
REFERENCES = {
    "pretrain": ("transformers, logits and gradients", "tests/contract/test_families.py",
                 "test_gradients_of_the_mean_loss"),
    "sft": ("torch, 20 steps, 1e-4", "tests/contract/test_sft_steps.py", "test_twenty_steps_follow_torch"),
    "lora": ("PEFT + torch, 20 steps, 1e-4", "tests/contract/test_lora_steps.py", "test_twenty_steps_follow_peft"),
    "dora": ("PEFT + torch, 20 steps, 1e-4", "tests/contract/test_lora_steps.py", "test_twenty_steps_follow_peft"),
    "qlora": ("PEFT + torch on the rounded base, 20 steps, 1e-4", "tests/contract/test_lora_steps.py",
              "test_twenty_steps_follow_peft"),
    "distil": ("the online teacher at K = V, 1e-5", "tests/contract/test_distil_steps.py",
               "test_a_cache_of_the_whole_vocabulary_is_the_teacher_itself"),
    "distil online": ("torch, 20 steps, 1e-4", "tests/contract/test_distil_steps.py",
                      "test_twenty_steps_follow_torch_and_go_on_after_a_stop"),
    "qat": ("torch, 20 steps, 5e-4", "tests/contract/test_qat_steps.py",
            "test_twenty_steps_follow_torch_and_transformers_loads_the_export"),
    "qat + lora": ("torch, 20 steps, 1e-4", "tests/contract/test_qat_steps.py",
                   "test_twenty_steps_of_a_recovery_adapter_follow_torch"),
    "dpo": ("torch, TRL's formulae, 20 steps, 1e-4", "tests/contract/test_preference_steps.py",
            "test_twenty_steps_follow_torch"),
    "dpo + lora": ("the cached reference, 1e-4", "tests/unit/objectives/test_preference.py",
                   "test_every_reference_says_the_same"),
    "muon": ("torch.optim.Muon and AdamW, 6 steps, 1e-3", "tests/unit/program/test_moments.py",
             "test_muon_is_torch_muon_on_linear_layers_and_adamw_elsewhere"),
    "adafactor": ("torch and transformers, 6 steps, 1e-4", "tests/unit/program/test_moments.py",
                  "test_adafactor_is_that_of_torch_and_transformers"),
    "lion": ("the paper's pseudo-code, 6 steps, 1e-5", "tests/unit/program/test_moments.py",
             "test_lion_is_the_papers_pseudo_code"),
    "adamw8bit": ("AdamW within the codes' error; bitsandbytes' codes", "tests/unit/program/test_moments.py",
                  "test_steps_are_adamw_within_the_error_of_the_codes"),
}  # fmt: skip
RECIPE = {"dora": "lora", "distil online": "distil", "qat + lora": "qat", "dpo + lora": "dpo"}
OPTIMIZERS = ("muon", "adafactor", "lion", "adamw8bit")
RECIPE |= dict.fromkeys(OPTIMIZERS, "pretrain")
OUT = {
    "pretrain": "Hugging Face folder", "sft": "Hugging Face folder", "lora": "PEFT folder, or merged",
    "dora": "PEFT folder, or merged", "qlora": "PEFT folder, or merged", "distil": "Hugging Face folder",
    "distil online": "Hugging Face folder", "qat": "compressed-tensors, or floats",
    "qat + lora": "compressed-tensors and PEFT", "dpo": "Hugging Face folder", "dpo + lora": "PEFT folder, or merged",
    **dict.fromkeys(OPTIMIZERS, "Hugging Face folder"),
}  # fmt: skip


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def table() -> str:
    lines = [
        "| method | reference | peak on v6e-1 | on v5e-8 | trained | recompiles | resumed | export, error of logits |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    tiny = results("methods_tiny")
    for name, one in results("methods").items():
        what, path, _ = REFERENCES[name]
        peaks = one["peak_gib"]
        learns = one["trainable_parameters"] / 1e6
        recompiles, exact, apart = (tiny[name][key] for key in ("recompiles", "resumed_exactly", "logits_apart"))
        lines.append(
            f"| {name} | {what} (`{Path(path).stem}`) | {peaks['v6e-1']:.2f} GiB | {peaks['v5e-8']:.2f} GiB | "
            f"{learns:,.1f}M | {recompiles} | {'exact' if exact else 'NOT EXACT'} | "
            f"{OUT[name]}, {apart:.0e} |"
        )
    return "\n".join(lines) + "\n"


def real() -> str:
    found = results("real_result")
    lines = ["| | seed 0 | seed 1 | smallest improvement |", "| --- | ---: | ---: | ---: |"]
    lines.append(f"| before training | {found['base']:.3f} | | |")
    for name in ("sft", "lora", "distil"):
        losses = [one["held_out"] for one in found[name]]
        gain = found["base"] - max(losses)
        lines.append(f"| {name} | {losses[0]:.3f} | {losses[1]:.3f} | {gain:.2f} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("name", "made"), [("table", table), ("real", real)])
def test_the_page_says_what_was_measured(name: str, made: Any) -> None:
    text = PAGE.read_text()
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = text.partition(begin)
    said, _, after = rest.partition(end)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(f"{before}{begin}\n{made()}\n{end}{after}")
        return
    assert said.strip("\n") + "\n" == made()


@pytest.mark.parametrize("name", REFERENCES)
def test_what_it_names_is_there(name: str) -> None:
    _, path, test = REFERENCES[name]
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
    assert (ROOT / "src/forerun/config/recipes" / f"{RECIPE.get(name, name)}.yaml").exists()


def test_each_seed_is_better_by_the_margin_that_is_stated() -> None:
    found = results("real_result")
    for name in ("sft", "lora", "distil"):
        assert len(found[name]) == 2
        assert all(one["held_out"] < found["base"] - 1.0 for one in found[name])
