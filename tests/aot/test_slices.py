"""Programs for several TPU slices: what crosses the network between them, and its simulated time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.methods.method import parameter_count
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.planner.time.collectives.slice_network import LATENCY_SECONDS, crosses_slices
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot

JOB: dict[str, Any] = {
    "model": {"layers": 2, "embed": 512, "heads": 4, "head_dim": 128, "mlp": 1024, "vocab": 1024},
    "data": "nothing",
    "sequence": 256,
    "batch": 32,
    "micro_batch": 1,
    "steps": 10,
}


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_parts_of_gradients_cross_once(dtype: str, item_bytes: int) -> None:
    """Two micro-batches on 2 x 8 chips: each device sends its eighth of the gradient, in the wanted dtype."""
    question = CompileRequest(
        ResolvedJob(Job.model_validate(JOB | {"mesh": {"dcn_dtype": dtype}})), slice_named("2xv5e-8")
    )
    answer = compiler.ask(question, threading.Event(), lambda phase: None)
    assert (answer.mesh, answer.fits) == ("2x(1x8x1)", True)
    assert answer.module is not None
    assert answer.step is not None
    sends = [
        (computation, x)
        for computation in answer.module.computations.values()
        for x in computation.instructions
        if crosses_slices(x) and x.op == "send"
    ]
    assert {computation.name for computation, _ in sends} == {answer.module.entry}
    sent = sum(
        operand.shapes[0].content_bytes
        for computation, x in sends
        if (operand := computation.operand(x, 0)) is not None
    )
    parameters = parameter_count(question.resolved)
    assert sent == pytest.approx(parameters / 8 * item_bytes, rel=0.05)
    # Of two slices, each host sends its data once: 25 GB/s for eight chips.
    network = answer.step.parts_seconds["network not hidden"]
    assert network <= sent / (25e9 / 8) + 2 * len(sends) * LATENCY_SECONDS
    assert network >= 0.5 * sent / (25e9 / 8)


def test_one_micro_batch_sends_layers_in_the_backward_loop() -> None:
    """The compiler sends a layer's gradient in the next iteration of the loop, and computes meanwhile."""
    job = JOB | {"model": {**JOB["model"], "layers": 8}, "batch": 16}
    question = CompileRequest(ResolvedJob(Job.model_validate(job)), slice_named("2xv5e-8"))
    answer = compiler.ask(question, threading.Event(), lambda phase: None)
    assert answer.module is not None
    sent = {True: 0.0, False: 0.0}  # by whether the computation is the entry, or a loop's body
    for computation in answer.module.computations.values():
        ops = [x for x in computation.instructions if crosses_slices(x)]
        is_entry = computation.name == answer.module.entry
        for x in ops:
            if x.op == "send" and (operand := computation.operand(x, 0)) is not None:
                sent[is_entry] += operand.shapes[0].content_bytes
        if ops and not is_entry:
            body = computation.instructions
            last_send = max(body.index(x) for x in ops if x.op == "send")
            done = min(n for n, x in enumerate(body) if x.op == "recv-done")
            between = [x for x in body[last_send:done] if x.op in ("fusion", "custom-call")]
            assert len(between) > 5, "the core computes between the send and the end of the exchange"
    layer = 3 * 512 * 1024 + 4 * 512 * 512
    matrices = 2 * 1024 * 512
    assert sent[False] == pytest.approx(layer / 8 * 4, rel=0.05)
    assert sent[True] < (2 * layer + matrices) / 8 * 4
