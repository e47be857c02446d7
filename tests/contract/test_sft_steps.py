"""Twenty steps of supervised fine-tuning beside a plain torch loop: transformers' own model, one document at a time.

The same tiny checkpoint, the same rows, AdamW of torch; forerun packs, masks, shards and scans, torch does nothing of
the kind.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_qwen3 import tiny_model, write_tokenizer
from torch_loop import job_batches, next_token_loss, training_losses

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.torch

STEPS = 20
CHATS = [
    (f"How many apples are in {n} baskets of {n % 5 + 1}?", f"{n * (n % 5 + 1)} apples" + " and a pear" * (n % 3))
    for n in range(2, 50)
]
FORMS = {
    "messages": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
    "prompt": lambda q, a: {"prompt": q, "completion": " " + a},
}


def checkpoint(folder: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    write_tokenizer(folder, template=template)
    tiny_model(48, head_dim=12).save_pretrained(folder)


def job_in(folder: Path, form: str) -> Job:
    checkpoint(folder / "base")
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(FORMS[form](q, a)) for q, a in CHATS))
    (folder / "job.yaml").write_text(
        "model: ./base\ndata: {path: chats.jsonl, store: tokens}\nsequence: 192\nbatch: 4\nmicro_batch: 2\n"
        f"steps: {STEPS}\ndevice: cpu\ndevices: 1\noptimizer: {{lr: 3e-3, warmup: 3}}\nsample: {{tokens: 0}}\n"
        "precision: {compute: float32, params: float32}\nruns: runs\n"
    )
    return load(folder / "job.yaml").job


def torch_losses(folder: Path, job: Job, rates: list[float]) -> list[float]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, attn_implementation="eager"
    )
    return training_losses(
        model.named_parameters(), job.optimizer, job_batches(job, STEPS), rates, next_token_loss(model)
    )


@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_follow_torch(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_in(tmp_path, form)
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    rows = read_metrics(tmp_path / "runs" / job.name / "metrics.jsonl")
    ours = np.array([row["loss"] for row in rows])
    theirs = np.array(torch_losses(tmp_path, job, [row["lr"] for row in rows]))
    assert ours[0] - ours[-1] > 1, "it has learned nothing: that would prove little"
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
