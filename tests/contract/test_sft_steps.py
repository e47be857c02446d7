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

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.objectives.batch import NAMES
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.open_data import batches_of
from forerun.run.run_devices import program_on
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
    """Every document by itself, its loss on the weighted targets; AdamW with decay on matrices only, clipped."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, attn_implementation="eager"
    )
    o = job.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.b1, o.b2), eps=o.eps)
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    batches = batches_of(resolved, program_on(resolved, choose("cpu", 1), corpus.rows.epoch), corpus)
    losses = []
    for number in range(STEPS):
        batch = batches.batch_at(number)
        adamw.zero_grad()
        total = torch.zeros(())
        flat = {name: np.asarray(getattr(batch, name)).reshape(-1, job.sequence) for name in NAMES}
        for row in range(job.batch):
            for segment in range(1, flat["segments"][row].max() + 1):
                here = flat["segments"][row] == segment
                ids = torch.from_numpy(flat["tokens"][row][here].astype(np.int64))[None]
                targets = torch.from_numpy(flat["targets"][row][here].astype(np.int64))
                weights = torch.from_numpy(flat["weights"][row][here])
                nats = torch.nn.functional.cross_entropy(model(ids).logits[0].float(), targets, reduction="none")
                total = total + (nats * weights).sum()
        loss = total / float(flat["weights"].sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        for group in adamw.param_groups:
            group["lr"] = rates[number]
        adamw.step()
        losses.append(float(loss.detach()))
    return losses


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
