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
from torch_loop import documents, job_batches, training_losses

from forerun.config.load import load
from forerun.config.schema import Job
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
    """Return loss and metrics of every step, with each answer by itself."""
    import torch
    import transformers
    from torch.nn.functional import logsigmoid

    def opened() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32, attn_implementation="eager"
        )

    def logps(model: Any, document: tuple[Any, Any, Any]) -> Any:
        ids, targets, counted = document
        each = torch.gather(model(ids[None]).logits[0].log_softmax(-1), 1, targets[:, None])[:, 0] * counted
        return each.sum() / counted.sum() if loss_name == "ipo" else each.sum()

    model, reference, beta = opened(), opened(), BETA[loss_name]
    steps: list[dict[str, float]] = []

    def mean_of_pairs(batch: Any) -> Any:
        answers = list(documents(batch))
        losses, accurate, margins = [], [], []
        for pair in zip(answers[::2], answers[1::2], strict=True):
            chosen, rejected = (logps(model, answer) for answer in pair)
            with torch.no_grad():
                was_chosen, was_rejected = (logps(reference, answer) for answer in pair)
            logit = (chosen - rejected) - (was_chosen - was_rejected)
            wrong = 0.2 if loss_name == "cdpo" else 0.0
            loss = -logsigmoid(beta * logit) * (1 - wrong) - logsigmoid(-beta * logit) * wrong
            losses.append((logit - 1 / (2 * beta)) ** 2 if loss_name == "ipo" else loss)
            accurate.append(float(logit > 0))
            margins.append(beta * float(logit.detach()))
        told = {"rewards/accuracies": float(np.mean(accurate)), "rewards/margins": float(np.mean(margins))}
        steps.append({"pairs": len(losses), **told})
        return torch.stack(losses).mean()

    losses = training_losses(model.named_parameters(), job.optimizer, job_batches(job, STEPS), rates, mean_of_pairs)
    return [{"loss": loss, **step} for loss, step in zip(losses, steps, strict=True)]


@pytest.mark.parametrize("loss", LOSSES)
def test_twenty_steps_follow_torch(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_in(tmp_path, loss)
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    rows = read_metrics(tmp_path / "runs" / job.name / "metrics.jsonl")
    theirs = torch_run(tmp_path, job, [row["lr"] for row in rows], loss)
    assert rows[-1]["rewards/accuracies"] > 0.5, "it has learned nothing"
    assert [row["pairs"] for row in rows] == [row["pairs"] for row in theirs]
    for name, near in (("loss", 1e-4), ("rewards/margins", 1e-4), ("rewards/accuracies", 1e-6)):
        first = name == "rewards/accuracies"  # at the first step all margins are 0, and their signs are rounding's
        ours, wanted = ([row[name] for row in steps[first:]] for steps in (rows, theirs))
        np.testing.assert_allclose(ours, wanted, rtol=near, atol=1e-5, err_msg=name)
