"""Twenty steps of DPO, IPO and cDPO beside a plain torch loop: transformers' own model, one answer at a time.

The same tiny checkpoint, the same pairs in the same order, TRL's formulae, AdamW of torch. forerun packs the pairs and
reads the reference from its cache; torch keeps a second model.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_qwen3 import tiny_model

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.open_data import batches_of
from forerun.run.run_devices import program_on
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.torch

STEPS = 20
LOSSES = {"dpo": "dpo", "ipo": "{loss: ipo, beta: 0.2}", "cdpo": "{loss: cdpo, beta: 0.3, smoothing: 0.2}"}
BETA = {"dpo": 0.1, "ipo": 0.2, "cdpo": 0.3}


def job_in(folder: Path, loss: str) -> Job:
    tiny_model(32, head_dim=8).save_pretrained(folder / "base")

    def row(n: int) -> dict[str, str]:
        yes, no = f" {n + n % 7}" + " yes" * (n % 3), f" {n}" + " no" * (n % 4)
        return {"prompt": f"{n} and {n % 7}?", "chosen": yes, "rejected": no}

    rows = [row(n) for n in range(3, 60)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "job.yaml").write_text(
        "model: ./base\ndata: {path: pairs.jsonl, store: tokens, tokenizer: bytes}\nsequence: 64\nbatch: 4\n"
        f"micro_batch: 2\nsteps: {STEPS}\ndevice: cpu\ndevices: 1\noptimizer: {{lr: 3e-3, warmup: 3}}\n"
        f"sample: {{tokens: 0}}\nprecision: {{compute: float32}}\nruns: runs\npreferences: {LOSSES[loss]}\n"
    )
    return load(folder / "job.yaml").job


def torch_run(folder: Path, job: Job, rates: list[float], loss_name: str) -> list[dict[str, float]]:
    """Loss and metrics of every step: each answer by itself; AdamW with decay on matrices only, clipped."""
    import torch
    import transformers
    from torch.nn.functional import logsigmoid

    torch.set_num_threads(1)

    def opened() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32, attn_implementation="eager"
        )

    def logps(model: Any, arrays: dict[str, Any], segment: int) -> Any:
        here = arrays["segments"] == segment
        ids, targets = (torch.from_numpy(arrays[name][here].astype(np.int64)) for name in ("tokens", "targets"))
        counted = torch.from_numpy(arrays["weights"][here])
        each = torch.gather(model(ids[None]).logits[0].log_softmax(-1), 1, targets[:, None])[:, 0] * counted
        return each.sum() / counted.sum() if loss_name == "ipo" else each.sum()

    model, reference, o, beta = opened(), opened(), job.optimizer, BETA[loss_name]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.b1, o.b2), eps=o.eps)
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    batches = batches_of(resolved, program_on(resolved, choose("cpu", 1), corpus.rows.epoch), corpus)
    steps = []
    for number in range(STEPS):
        batch = batches.batch_at(number)
        names = ("tokens", "targets", "weights", "segments")
        flat = {name: np.asarray(getattr(batch, name)).reshape(-1, job.sequence) for name in names}
        losses, accurate, margins = [], [], []
        for row in range(job.batch):
            arrays = {name: flat[name][row] for name in names}
            for first in range(1, arrays["segments"].max(), 2):
                chosen, rejected = (logps(model, arrays, first + side) for side in (0, 1))
                with torch.no_grad():
                    was_chosen, was_rejected = (logps(reference, arrays, first + side) for side in (0, 1))
                logit = (chosen - rejected) - (was_chosen - was_rejected)
                wrong = 0.2 if loss_name == "cdpo" else 0.0
                loss = -logsigmoid(beta * logit) * (1 - wrong) - logsigmoid(-beta * logit) * wrong
                losses.append((logit - 1 / (2 * beta)) ** 2 if loss_name == "ipo" else loss)
                accurate.append(float(logit > 0))
                margins.append(beta * float(logit.detach()))
        adamw.zero_grad()
        mean = torch.stack(losses).mean()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        for group in adamw.param_groups:
            group["lr"] = rates[number]
        adamw.step()
        told = {"rewards/accuracies": float(np.mean(accurate)), "rewards/margins": float(np.mean(margins))}
        steps.append({"loss": float(mean.detach()), "pairs": len(losses), **told})
    return steps


@pytest.mark.parametrize("loss", LOSSES)
def test_twenty_steps_follow_torch(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_in(tmp_path, loss)
    out = io.StringIO()
    with make_display(out) as display:
        assert train(job, display) is not None
    assert "reference: the starting model, evaluated once on every pair" in out.getvalue()
    rows = read_metrics(tmp_path / "runs" / job.name / "metrics.jsonl")
    theirs = torch_run(tmp_path, job, [row["lr"] for row in rows], loss)
    assert rows[-1]["rewards/accuracies"] > 0.5, "it has learned nothing"
    assert [row["pairs"] for row in rows] == [row["pairs"] for row in theirs]
    for name, near in (("loss", 1e-4), ("rewards/margins", 1e-4), ("rewards/accuracies", 1e-6)):
        first = name == "rewards/accuracies"  # at the first step all margins are 0, and their signs are rounding's
        ours, wanted = ([row[name] for row in steps[first:]] for steps in (rows, theirs))
        np.testing.assert_allclose(ours, wanted, rtol=near, atol=1e-5, err_msg=name)
