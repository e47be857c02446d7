"""Adapters of a float32 checkpoint: the base is not rounded, so the merged export and PEFT compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lora_reference import checkpoint, job_in, torch_logits, torch_model, trained
from tiny_qwen3 import write_tokenizer

from forerun.hub.documents import read_json
from forerun.methods.job_notes import warnings_of
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob
from forerun.verbs.export.export import export

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
IDS = np.frombuffer(b"5 pears and 2 apples", np.uint8)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def test_the_merged_export_and_peft_on_the_true_base_agree(tmp_path: Path) -> None:
    import peft
    import transformers

    base = checkpoint(tmp_path / "base")
    write_tokenizer(base, template=TEMPLATE)
    job = job_in(tmp_path, "{rank: 4}", "steps=3", "data.tokenizer=null")
    trained(job)
    run = str(tmp_path / "runs" / "run")
    export(run, str(tmp_path / "adapter"))
    export(run, str(tmp_path / "merged"), merge=True)

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    with_adapter = peft.PeftModel.from_pretrained(torch_model(base), tmp_path / "adapter")
    expected = torch_logits(with_adapter, IDS)
    merged = torch_logits(torch_model(tmp_path / "merged"), IDS)
    assert np.abs(merged - expected).max() < 1e-5
    assert np.abs(torch_logits(torch_model(base), IDS) - expected).max() > 1e-4, "the adapters change nothing"

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert tokenizer.chat_template == TEMPLATE
    text = "5 pears and 2 apples"
    assert tokenizer(text)["input_ids"] == transformers.AutoTokenizer.from_pretrained(base)(text)["input_ids"]
    adapter_alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert np.abs(torch_logits(adapter_alone.eval(), IDS) - expected).max() < 1e-5


def test_the_base_has_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    import torch
    import transformers

    base = checkpoint(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    stored: dict[torch.dtype, str] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "bfloat16",
    }
    for number, (dtype, expected) in enumerate(stored.items()):
        folder = tmp_path / f"base{number}"
        model.to(dtype).save_pretrained(folder)
        # The files decide, not config.json.
        config = read_json(folder / "config.json") | {"dtype": "float16"}
        (folder / "config.json").write_text(json.dumps(config))
        job = job_in(tmp_path, "{rank: 4}", f"model={folder}")
        resolved = resolve_model(job).job
        assert resolved.lora is not None
        assert resolved.lora.base == expected
        warned = [text for text in warnings_of(ResolvedJob(job)) if "lora.base" in text]
        assert len(warned) == (dtype == torch.float16)
        for base_dtype in ("float32", "bfloat16"):
            explicit = job_in(tmp_path, "{rank: 4}", f"model={folder}", f"lora.base={base_dtype}")
            warned = [text for text in warnings_of(ResolvedJob(explicit)) if "lora.base" in text]
            assert len(warned) == (base_dtype != str(dtype).removeprefix("torch."))
