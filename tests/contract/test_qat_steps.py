"""Quantization-aware training beside plain torch, and its export in transformers: the same losses, the same logits."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_reference import our_logits, peft_start
from qat_reference import recovering_model, rounded_model
from safetensors.numpy import load_file
from test_sft_steps import checkpoint
from torch_loop import job_batches, next_token_loss, training_losses

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.verbs.export.export import export

pytestmark = pytest.mark.torch

STEPS = 20
TEXT = "".join(f"{n} times {n % 7} is {n * (n % 7)}, and {n} plus nine is {n + 9}. " for n in range(400))
WAYS = {
    "int4 in groups": "{weights: int4, group: 12}",
    "int4, learned": "{weights: int4, group: 24, scales: learned}",
    "int8, activations": "{weights: int8, group: null, activations: int8}",
    "int8, learned, some": "{weights: int8, group: null, scales: learned, targets: [q_proj, down_proj]}",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "base"
    checkpoint(folder)
    return folder


def job_in(folder: Path, base: Path, qat: str, *more: str) -> Job:
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(
        f"name: run\nmodel: {base}\nqat: {qat}\ndata: {{path: text.txt, store: tokens}}\nsequence: 48\nbatch: 4\n"
        f"steps: {STEPS}\ndevice: cpu\ndevices: 1\noptimizer: {{lr: 3e-3, warmup: 3}}\nsample: {{tokens: 0}}\n"
        f"precision: {{compute: float32, params: float32}}\nruns: {folder / 'runs'}\nremat: none\n"
    )
    return load(folder / "job.yaml", list(more)).job


def trained(job: Job) -> Path:
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    return Path(job.runs) / job.name


def torch_losses(model: Any, job: Job, rows: list[dict[str, Any]]) -> np.ndarray:
    batches, rates = job_batches(job, STEPS), [row["lr"] for row in rows]
    return np.array(training_losses(model.named_parameters(), job.optimizer, batches, rates, next_token_loss(model)))


def follows(ours: np.ndarray, theirs: np.ndarray) -> None:
    """To rounding at first. A last bit that differs, as it does between kinds of CPU, may later carry a weight over the
    middle between two of sixteen levels, and one such weight makes 5e-5 of the loss."""
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=5e-4)


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_follow_torch_and_transformers_loads_the_export(
    way: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    job = job_in(tmp_path, base, WAYS[way])
    run = trained(job)
    rows = read_metrics(run / "metrics.jsonl")
    ours = np.array([row["loss"] for row in rows])
    reference = rounded_model(base, job.qat)
    if job.qat is not None and job.qat.targets != "all-linear":
        for name, module in reference.named_modules():
            if torch.nn.utils.parametrize.is_parametrized(module) and name.rpartition(".")[2] not in job.qat.targets:
                torch.nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    theirs = torch_losses(reference, job, rows)
    assert ours[0] - ours[-1] > 1, "it has learned nothing: that would prove little"
    follows(ours, theirs)

    exported = export(str(run), str(tmp_path / "out")).folder
    tensors = load_file(exported / "model.safetensors")
    assert not any(name.endswith("q_proj.weight") and x.dtype == np.float32 for name, x in tensors.items())
    ids = np.asarray(job_batches(job, 1)[0].tokens).reshape(-1, job.sequence)[:3].astype(np.int32)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        got = loaded(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    expected = our_logits(run, ids)
    assert expected.std() > 0.3, "flat logits would agree with anything"
    np.testing.assert_allclose(got, expected, atol=1e-2)
    second, first = np.moveaxis(np.sort(expected, axis=-1)[..., -2:], -1, 0)
    clear = first - second > 2e-2  # nearer ones may change places within the difference that is allowed above
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert json.loads((exported / "config.json").read_text())["quantization_config"]["quant_method"]


@pytest.mark.parametrize("qat", ["{weights: int4, group: 12}", "{weights: int8, group: null, activations: int8}"])
def test_twenty_steps_of_a_recovery_adapter_follow_torch(
    qat: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 32 beside weights that rest rounded, from adapters that already change something."""
    monkeypatch.chdir(tmp_path)
    first = peft_start(base, tmp_path / "first", r=32, lora_alpha=16, target_modules="all-linear")
    job = job_in(tmp_path, base, qat, f"lora={{rank: 32, alpha: 16, base: float32, start: {first}}}")
    rows = read_metrics(trained(job) / "metrics.jsonl")
    ours = np.array([row["loss"] for row in rows])
    reference = recovering_model(base, job.qat, first, 16 / 32)
    theirs = torch_losses(reference, job, rows)
    assert ours[0] - ours[-1] > 0.2, "it has learned nothing: that would prove little"
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert ours[0] == pytest.approx(theirs[0], rel=3e-6), "rounded activations alone make 1e-5"


def test_peft_loads_the_adapters_over_the_integers(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    job = job_in(tmp_path, base, "{weights: int4, group: 12}", "lora={rank: 4, base: float32}", "steps=8")
    run = trained(job)
    exported = export(str(run), str(tmp_path / "out")).folder
    ids = np.asarray(job_batches(job, 1)[0].tokens).reshape(-1, job.sequence)[:2].astype(np.int32)
    expected = our_logits(run, ids)
    under: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        alone = under(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
        loaded = peft.PeftModel.from_pretrained(under, str(exported / "adapter"))
        got = loaded(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(got, expected, atol=1e-2)
    assert np.abs(alone - expected).max() > 0.05, "the adapters do something"
