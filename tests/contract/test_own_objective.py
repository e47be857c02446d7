"""An objective of the user's own: found beside the job file, told what is wrong with it, and equal to torch."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error

from forerun.config.load import load
from forerun.config.training_method import CustomObjective
from forerun.models.base import Readout
from forerun.objectives.base import custom_objective
from forerun.objectives.batch import Batch
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "objective"


@pytest.fixture
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands do: modules are found beside the job file."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


def made(**options: Any) -> Any:
    return custom_objective(CustomObjective(name="zloss:ZLoss", options=options), 4)


@pytest.mark.torch
@pytest.mark.usefixtures("_beside")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_example_is_what_torch_says(softcap: float | None) -> None:
    import torch

    rng = np.random.default_rng(0)
    hidden, matrix = (rng.normal(size=size).astype(np.float32) for size in ((2, 10, 8), (21, 8)))
    targets = rng.integers(0, 21, (2, 10)).astype(np.int32)
    weights = (rng.random((2, 10)) < 0.6).astype(np.float32)
    model: Any = SimpleNamespace(apply=lambda params, *_: Readout(*params, softcap))
    batch = Batch(*(jnp.asarray(x) for x in (targets, targets, weights, targets, targets)))

    def loss(params: Any) -> Any:
        sums = made(weight=0.3)(model, params, batch, None)
        return sums.loss, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))((jnp.asarray(hidden), jnp.asarray(matrix)))
    h, m = (torch.from_numpy(x).requires_grad_() for x in (hidden, matrix))
    logits = h @ m.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), reduction="none"
    )
    squares = torch.logsumexp(logits, -1).flatten() ** 2
    counted = torch.from_numpy(weights).flatten()
    total = ((nats + 0.3 * squares) * counted).sum()
    total.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(sums.loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose(sums.told["log_z_squared"], (squares * counted).sum().item(), rtol=1e-5)
    assert float(sums.weight) == weights.sum()
    for have, want in zip(gradients, (h.grad, m.grad), strict=True):
        assert want is not None
        np.testing.assert_allclose(have, want.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_beside")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    given = ["device=cpu", "devices=1", f"data.store={tmp_path / 'store'}", f"runs={tmp_path / 'runs'}", "steps=6"]
    given += ["sequence=64", "model.layers=1", "model.embed=16", "checkpoint.every=4"]
    lines = (EXAMPLE.parent / "quickstart" / "text" / "carroll-alice.txt").read_text()[:40_000].split("\n\n")
    (tmp_path / "alice.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines if line))
    given += [f"data.path={tmp_path / 'alice.jsonl'}", "data.validation=0.1"]
    job = load(EXAMPLE / "job.yaml", given).job
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    rows = read_metrics(tmp_path / "runs" / job.name / "metrics.jsonl")
    looks = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in looks] == [4, 6]
    for row in looks:
        assert row["validation_perplexity"] == pytest.approx(math.exp(row["validation_nats"]))
        assert row["validation_loss"] > row["validation_nats"] + 0.1, "else it might be that of the loss"
    rows = [row for row in rows if "loss" in row]
    first, last = rows[0], rows[-1]
    for row in rows:
        np.testing.assert_allclose(row["loss"], row["nats"] + 1e-2 * row["log_z_squared"], rtol=1e-5)
    assert first["nats"] == pytest.approx(math.log(384), abs=0.3)  # as many ids as the model has, all alike
    assert last["nats"] < first["nats"] - 0.2
    assert last["log_z_squared"] < first["log_z_squared"]


WRONG = {
    "nothing:Here": ("E-MODEL-007", "'nothing'"),
    "zloss:Nothing": ("E-MODEL-008", "'Nothing'"),
    "types:SimpleNamespace": ("E-MODEL-010",),
}


@pytest.mark.usefixtures("_beside")
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name: str) -> None:
    with raises_error(*WRONG[name]):
        custom_objective(CustomObjective(name=name), 4)


def test_what_a_run_holds_is_not_for_an_objective_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greedy_loss.py").write_text(
        "from forerun.objectives.base import Plain\n"
        "class Greedy(Plain):\n"
        "    def __init__(self, chunk): pass\n"
        "    def __call__(self, model, params, batch, compute): pass\n"
        "    def extras(self, rows, sequence): return {'more': None}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises_error("E-METHOD-004"):
        custom_objective(CustomObjective(name="greedy_loss:Greedy"), 4)


@pytest.mark.usefixtures("_beside")
def test_options_that_it_does_not_take() -> None:
    with raises_error("E-MODEL-009") as caught:
        made(wieght=1)
    assert "wieght" in caught.value.why
    assert "chunk" in caught.value.fix


def test_a_name_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: qwen3-0.6b\ndata: x\nobjective: zloss\n")
    with raises_error("E-JOB-031", "module.path:Class"):
        load(tmp_path / "job.yaml")
    (tmp_path / "job.yaml").write_text("model: qwen3-0.6b\ndata: x\nobjective: a:B\npreferences: dpo\n")
    with raises_error("E-JOB-032"):
        load(tmp_path / "job.yaml")


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "zloss.py").read_text().splitlines()) < 100
