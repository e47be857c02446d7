"""Distillation as people run it: twenty steps beside a plain torch loop, with the teacher in the step and with its
words from a cache; an interrupted run is the run that was not.

Torch computes every logit of teacher, student and starting model, one document at a time; forerun none of that. The
checkpoints hold bfloat16 numbers, so that a teacher at rest in bfloat16 is the same teacher.
"""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_qwen3 import VOCAB, tiny_model, write_tokenizer
from torch_loop import job_batches, mean_loss, training_losses

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.reporter import LineReporter, StepView
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.train import TrainResult, train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.verbs.export.export import export
from forerun.verbs.write_cache import write_cache

pytestmark = pytest.mark.torch

STEPS = 20
TEXTS = [f"In year {n} the harbour of Vik counted {n * 7 % 31} ships and {n % 5} whales.\n" * 2 for n in range(40)]
JOB = f"""\
model: ./base
data: {{path: texts.jsonl, store: tokens, packing: whole, validation: 0.1}}
sequence: 160
batch: 4
micro_batch: 2
steps: {STEPS}
device: cpu
devices: 1
optimizer: {{lr: 3e-3, warmup: 3}}
checkpoint: {{every: 5}}
precision: {{compute: float32, params: float32}}
remat: none
sample: {{tokens: 0}}
distil: {{teacher: ./teacher, temperature: 2.0, soft: 0.6}}
"""
ANCHORED = ("distil.anchor=0.5", "distil.anchor_share=1.0")
CACHED = ("distil.cache=words", f"distil.top_k={VOCAB}")
Trained = tuple[TrainResult, list[dict[str, Any]]]


def checkpoint(folder: Path, width: int, seed: int, extra: str = "") -> None:
    write_tokenizer(folder, *([extra] if extra else []))
    tiny_model(width, head_dim=12, seed=seed, initializer_range=0.1).bfloat16().save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    made = tmp_path_factory.mktemp("distil")
    checkpoint(made / "base", 48, 0)
    checkpoint(made / "teacher", 64, 1)
    (made / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (made / "job.yaml").write_text(JOB)
    return made


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def job_of(*overrides: str) -> Job:
    return load("job.yaml", overrides).job


def trained(*overrides: str, display: Any = None) -> Trained:
    job = job_of(*overrides)
    with display or make_display(io.StringIO()) as shown:
        finished = train(job, shown)
    assert finished is not None
    return finished, read_metrics(Path("runs") / job.name / "metrics.jsonl")


def losses(rows: list[dict[str, Any]], name: str = "loss") -> np.ndarray:
    return np.array([row[name] for row in rows if name in row])


def torch_losses(job: Job, rates: list[float]) -> np.ndarray:
    import torch
    import transformers
    from torch.nn import functional

    def model(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")

    distil = job.distil
    assert distil is not None
    student, teacher, start = model("base"), model("teacher").eval(), model("base").eval()

    def kl(theirs: Any, ours: Any, temperature: float) -> Any:
        log_p, log_q = (functional.log_softmax(x / temperature, -1) for x in (theirs, ours))
        return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    def losses_of(ids: Any, targets: Any) -> Any:
        logits = student(ids[None]).logits[0]
        with torch.no_grad():
            teacher_logits, start_logits = teacher(ids[None]).logits[0], start(ids[None]).logits[0]
        hard = functional.cross_entropy(logits, targets, reduction="none")
        soft = distil.temperature**2 * kl(teacher_logits, logits, distil.temperature)
        return (1 - distil.soft) * hard + distil.soft * soft + distil.anchor * kl(start_logits, logits, 1.0)

    return np.array(
        training_losses(
            student.named_parameters(), job.optimizer, job_batches(job, STEPS), rates, lambda b: mean_loss(b, losses_of)
        )
    )


def torch_perplexity(job: Job) -> float:
    """Of the exported model, on the documents that were kept back, one by one."""
    import torch
    import transformers

    exported = export(f"runs/{job.name}", f"{job.name}-exported", dtype="float32").folder
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    kept = open_corpus(resolve_model(job)).parts[0].store.validation
    assert kept is not None
    nats = count = 0.0
    for start, stop in pairwise(kept.begins(np.arange(len(kept) + 1)).tolist()):
        ids = torch.from_numpy(np.asarray(kept.read(start, stop)[0], np.int64))
        with torch.no_grad():
            nats += float(torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="sum"))
        count += len(ids) - 1
    return float(np.exp(nats / count))


@pytest.fixture(scope="module")
def online(folder: Path) -> Trained:
    """A run with the teacher in the step, and a pull towards the beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return trained("name=online", *ANCHORED)


def test_twenty_steps_follow_torch_and_go_on_after_a_stop(online: Trained) -> None:
    _, rows = online
    expected = torch_losses(job_of(*ANCHORED), [row["lr"] for row in rows if "lr" in row])
    assert expected[0] - expected[-1] > 0.5, "it has learned nothing: that would prove little"
    np.testing.assert_allclose(losses(rows), expected, rtol=1e-4)
    mixed = 0.4 * losses(rows, "hard") + 0.6 * losses(rows, "soft") + 0.5 * losses(rows, "anchor")
    np.testing.assert_allclose(losses(rows), mixed, rtol=1e-5)
    assert abs(losses(rows, "anchor")[0]) < 1e-5
    assert losses(rows, "anchor")[-1] > 0.05
    wanted = torch_perplexity(job_of("name=online", *ANCHORED))
    assert losses(rows, "validation_perplexity")[-1] == pytest.approx(wanted, rel=1e-4)
    assert wanted > 2 * np.exp(losses(rows, "validation_loss")[-1]), "that of the mixed loss is another"
    require_resumed("online", ANCHORED, online)


def test_a_cache_of_the_whole_vocabulary_is_the_teacher_itself(online: Trained) -> None:
    """Within what 16 bits keep of a logit: 1e-5 of the loss."""
    with make_display(io.StringIO()) as display:
        written = write_cache(resolve_model(job_of(*CACHED)), display)
    assert written.shards == written.layout.shards > 3
    _, rows = trained("name=cached", *ANCHORED, *CACHED)
    np.testing.assert_allclose(losses(rows), losses(online[1]), rtol=1e-5)
    looks = [losses(run, "validation_loss") for run in (rows, online[1])]
    assert len(looks[0]) == 4
    np.testing.assert_allclose(*looks, rtol=1e-5)


def test_a_run_with_split_sequences_is_that_of_one_device(online: Trained) -> None:
    """The cache is written on four devices, which have complete rows. The student and its start are split."""
    split = ("distil.cache=split", f"distil.top_k={VOCAB}", "devices=4", "mesh.fsdp=2", "mesh.context=2")
    with make_display(io.StringIO()) as display:
        write_cache(resolve_model(job_of(*split)), display)
    _, rows = trained("name=split", *ANCHORED, *split)
    for figure in ("loss", "soft", "anchor", "validation_loss"):
        np.testing.assert_allclose(losses(rows, figure), losses(online[1], figure), rtol=2e-5)


@pytest.mark.slow
def test_adapters_learn_from_a_cache_of_a_few_tokens_and_go_on_after_a_stop() -> None:
    """The beginning is the base under the adapters."""
    method = ("lora={rank: 4, base: float32}", "distil.anchor=0.5", "distil.cache=few", "distil.top_k=8")
    with make_display(io.StringIO()) as display:
        write_cache(resolve_model(job_of(*method)), display)
    whole = trained("name=lora", *method)
    _, rows = whole
    assert losses(rows)[0] - losses(rows)[-1] > 0.1
    assert losses(rows, "anchor")[0] == 0, "an adapter changes nothing before its first step"
    assert losses(rows, "anchor")[-1] > 1e-3
    require_resumed("lora", method, whole)


@pytest.mark.slow
def test_rounded_weights_an_adapter_and_a_teacher_learn_in_one_job() -> None:
    method = ("qat={weights: int4, group: 12}", "lora={rank: 4, base: float32}")
    _, rows = trained("name=all", *method)
    np.testing.assert_allclose(losses(rows), 0.4 * losses(rows, "hard") + 0.6 * losses(rows, "soft"), rtol=1e-5)
    assert losses(rows, "soft")[0] - losses(rows, "soft")[-1] > 0.05


class Breaks(LineReporter):
    def step(self, view: StepView) -> None:
        if view.step == 12:
            raise KeyboardInterrupt


def require_resumed(name: str, method: tuple[str, ...], uninterrupted: Trained) -> None:
    """Cut off after step 12 and started again, it is the uninterrupted run to the last bit."""
    with pytest.raises(KeyboardInterrupt):
        trained(f"name={name}-cut", *method, display=Breaks(io.StringIO(), clock=time.monotonic))
    resumed, rows = trained(f"name={name}-cut", *method)
    whole, expected = uninterrupted
    assert resumed.summary["resumed_at"] == 10
    for figure in ("loss", "hard", "soft", "anchor", "validation_loss"):
        np.testing.assert_array_equal(losses(rows, figure), losses(expected, figure))
    for one, other in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
