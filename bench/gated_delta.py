"""Planned time of the gated delta rule on TPUs: chunk lengths, groups, and ways to solve the triangular system.

    python bench/gated_delta.py v5e v6e

Compiles forward and backward pass of the delta rule of one qwen3.5-4b layer (32 heads of 128) for one chip, without a
TPU. `planned` is the simulation of `forerun plan`, which does not model vector arithmetic. `cycles` is the sum of the
compiler's own estimates, which are too high for vector operations. The truth is between them. Variants whose result is
already in bench/results/gated_delta.json are skipped, so an interrupted run can continue. Also writes gated_delta.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from forerun.hardware.chips import chip_named
from forerun.hardware.slices import slice_named
from forerun.nn import gated_delta
from forerun.nn.gated_delta import DeltaInputs, gated_delta_rule
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.prediction import step_time
from forerun.planner.time.trip_counts import Loops

RESULTS = Path(__file__).parent / "results"
ROWS, LENGTH, KEY_HEADS, HEADS, WIDTH = 2, 4096, 16, 32, 128
Inverse = Callable[[jax.Array], jax.Array]


def solved(system: jax.Array) -> jax.Array:
    """Return the inverse by a triangular solve."""
    one = jnp.eye(system.shape[-1])
    return jax.scipy.linalg.solve_triangular(
        system + one, jnp.broadcast_to(one, system.shape), lower=True, unit_diagonal=True
    )


def power_series(system: jax.Array) -> jax.Array:
    """Return the inverse by (1 - A)(1 + A^2)(1 + A^4)..., which is not exact for similar keys."""
    one, power, length = jnp.eye(system.shape[-1]), system, 2
    inverse = one - system
    while length < system.shape[-1]:
        power = power @ power
        inverse, length = inverse @ (one + power), 2 * length
    return inverse


INVERSES: dict[str, Inverse] = {"blocks": gated_delta._inverse, "solve": solved, "series": power_series}
VARIANTS = (
    ("blocks", 64, 1),
    ("blocks", 128, 1),
    ("solve", 64, 1),
    ("series", 64, 1),
    ("blocks", 32, 1),
    ("blocks", 64, 2),
    ("blocks", 64, 4),
    ("blocks", 128, 2),
    ("solve", 128, 1),
)


def compiled(chip: str, variant: tuple[str, int, int]) -> Any:
    """Return the compiled forward and backward pass."""
    inverse, chunk, group = variant
    gated_delta._inverse = INVERSES[inverse]  # type: ignore[assignment]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:1x1", chips_per_host_bounds=(1, 1, 1)
    )
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((ROWS, LENGTH, *shape), dtype, sharding=place)

    keys, values, head = array(KEY_HEADS, WIDTH), array(HEADS, WIDTH), array(HEADS, dtype=jnp.float32)
    inputs = DeltaInputs(keys, keys, values, head, head)

    def step(inputs: DeltaInputs, segments: jax.Array, slope: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: gated_delta_rule(x, segments, chunk=chunk, group=group), inputs)
        return out, pull(slope)

    return jax.jit(step).lower(inputs, array(dtype=jnp.int32), values).compile()


def estimated_cycles(module: Module, name: str, loops: Loops) -> float:
    """Return the compiler's cycles of a computation, with the bodies of its loops."""
    total, computation = 0.0, module.computations[name]
    for x in computation.instructions:
        if x.op == "while":
            total += loops.trips(computation, x) * estimated_cycles(module, x.attribute("body") or "", loops)
        elif found := re.search(r'"estimated_cycles":"(\d+)"', x.attributes):
            total += int(found[1])
    return total


def measured(chip: str, variant: tuple[str, int, int]) -> dict[str, Any]:
    """Return the figures of one variant, in milliseconds and MiB."""
    program = compiled(chip, variant)
    module, found = parse(program.as_text()), chip_named(chip)
    cycles = estimated_cycles(module, module.entry, Loops(module))
    return {
        "chip": chip,
        "inverse": variant[0],
        "chunk": variant[1],
        "group": variant[2],
        "planned_ms": round(step_time(module, slice_named(f"{chip}-1")).mid_seconds * 1e3, 2),
        "cycles_ms": round(cycles / chip_model_of(found).clock_hz * 1e3, 2),
        "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20),
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = ("chip", "inverse", "chunk", "group", "planned_ms", "cycles_ms", "temporary_mib")
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    ordered = sorted(rows, key=lambda row: (row["chip"], row["planned_ms"]))
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in ordered]) + "\n"


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    path = RESULTS / "gated_delta.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
    done = {(row["chip"], row["inverse"], row["chunk"], row["group"]) for row in rows}
    for variant in VARIANTS:
        for chip in sys.argv[1:] or ["v5e", "v6e"]:
            if (chip, *variant) in done:
                continue
            rows.append(measured(chip, variant))
            print(rows[-1], flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
            (RESULTS / "gated_delta.md").write_text(table(rows), "utf-8")


if __name__ == "__main__":
    main()
