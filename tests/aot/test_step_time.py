"""The scheduled program does the work of its model: its matmul FLOPs, loops multiplied out, are the analytic ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.simulation import Simulation

pytestmark = pytest.mark.aot

LAYERS, EMBED, HEADS, HEAD, MLP, VOCAB, SEQUENCE = 3, 512, 4, 128, 1536, 4096, 512
MODEL = {"layers": LAYERS, "embed": EMBED, "heads": HEADS, "head_dim": HEAD, "mlp": MLP, "vocab": VOCAB}
OFFLOAD = {"policy": "named", "offload": ["layer_in"]}


def matmul_flops(tokens: int, rotated: bool) -> int:
    """Forward, forward again for the backward pass (without the last projection), backward; logits once.

    Where a product rotates queries and keys, its three passes need HEAD multiplications for each of their elements.
    """
    attention, down = 4 * EMBED * HEADS * HEAD, MLP * EMBED
    layer = attention + 3 * down
    rotation = 3 * 2 * HEADS * HEAD * HEAD if rotated else 0
    return 2 * tokens * (LAYERS * (4 * layer - down + rotation) + 3 * VOCAB * EMBED)


@pytest.mark.parametrize(
    ("slice_name", "fields"),
    [
        ("v5e-8", {"batch": 48, "micro_batch": 2, "remat": "full"}),  # three turns of accumulation
        ("v6e-8", {"batch": 16, "mesh": {"tp": 2}, "remat": OFFLOAD}),
    ],
)
def test_matmul_flops(slice_name: str, fields: dict[str, Any], scheduled_program: Callable[[Job, str], str]) -> None:
    job = Job.model_validate({"model": MODEL, "data": "nothing", "sequence": SEQUENCE, "steps": 10, **fields})
    wanted = slice_named(slice_name)
    module = parse(scheduled_program(job, slice_name))
    spent = Simulation(module, chip_model_of(wanted.chip), wanted.chip.name, Torus.of(wanted)).run()
    wanted_flops = matmul_flops(job.batch * SEQUENCE // wanted.devices, rotated=slice_name.startswith("v6e"))
    assert spent.flops["matmul"] == pytest.approx(wanted_flops, rel=0.02)
    assert sum(spent.by_kind.values()) == pytest.approx(spent.seconds)
    if "mesh" in fields:
        rows = job.batch * SEQUENCE // wanted.devices  # tensor parallelism splits the residual stream, too
        kept = LAYERS * rows * EMBED * 2 / chip_model_of(wanted.chip).host_bytes_per_second
        assert spent.busy["to host"] == pytest.approx(kept, rel=0.1)
        assert spent.busy["from host"] == pytest.approx(kept, rel=0.1)
