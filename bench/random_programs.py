"""Compile random JAX programs for TPUs and check that no predicted time is below the data sheet's rates.

python bench/random_programs.py 100    # programs; seconds for each; needs libtpu (the `plan` extra), no TPU

Each program is a chain of random operations: matrix multiplications, batched ones, elementwise operations, softmax,
reductions, scans, gathers and updates in place. The script counts their matrix FLOPs and the bytes of the program's
inputs and outputs itself. Writes bench/results/random_programs.json.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import simulation_of
from forerun.planner.time.roofline import PeakRates, time_floor

RESULTS = Path(__file__).resolve().parent / "results" / "random_programs.json"
SLICES = {"v5e-4": "v5e:2x2", "v5p-8": "v5p:2x2x1", "v6e-4": "v6e:2x2"}
SIZES = (8, 64, 128, 256, 512, 1024, 2048)


@dataclass
class RandomProgram:
    """A random function of arrays, with its matrix FLOPs."""

    seed: int
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    flops: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.rows, width = self.size(), self.size()
        self.dtype = self.draw.choice((jnp.bfloat16, jnp.float32))
        self.shapes.append((self.rows, width))
        self.steps: list[Callable[..., Any]] = []
        for _ in range(self.draw.randint(1, 5)):
            step = self.draw.choice((self.matmul, self.heads, self.elementwise, self.softmax, self.scan, self.update))
            width = step(width)

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def weight(self, *shape: int) -> int:
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def matmul(self, width: int) -> int:
        other = self.size()
        number = self.weight(width, other)
        self.flops += 2 * self.rows * width * other
        self.steps.append(lambda x, w: jnp.tanh(x @ w[number]))
        return other

    def heads(self, width: int) -> int:
        """Append an attention-like pair of batched products with narrow heads."""
        head = self.draw.choice((32, 64, 128))
        batch, keys = self.draw.choice((2, 8)), self.size()
        number = self.weight(batch, keys, head)
        into = self.weight(width, batch * head)
        self.flops += 2 * self.rows * batch * head * (width + 2 * keys)

        def step(x: jax.Array, w: list[jax.Array]) -> jax.Array:
            queries = (x @ w[into]).reshape(self.rows, batch, head)
            scores = jax.nn.softmax(jnp.einsum("tbd,bsd->bts", queries, w[number]).astype(jnp.float32))
            return jnp.einsum("bts,bsd->tbd", scores.astype(x.dtype), w[number]).reshape(self.rows, batch * head)

        self.steps.append(step)
        return batch * head

    def elementwise(self, width: int) -> int:
        number = self.weight(width)
        self.steps.append(lambda x, w: jnp.sqrt(jnp.abs(x) + 1) / (1 + jnp.abs(w[number])))
        return width

    def softmax(self, width: int) -> int:
        self.steps.append(lambda x, w: jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype) + jnp.mean(x))
        return width

    def scan(self, width: int) -> int:
        trips = self.draw.randint(2, 64)
        number = self.weight(width, width)
        self.flops += 2 * self.rows * width * width * trips

        def step(x: jax.Array, w: list[jax.Array]) -> jax.Array:
            return jax.lax.scan(lambda state, _: (jnp.tanh(state @ w[number]), None), x, None, length=trips)[0]

        self.steps.append(step)
        return width

    def update(self, width: int) -> int:
        number = self.weight(1, width)
        self.steps.append(lambda x, w: jax.lax.dynamic_update_slice(x, w[number] + x[:1], (self.rows // 2, 0)))
        return width

    def run(self, x: jax.Array, *weights: jax.Array) -> jax.Array:
        arrays = [x, *weights]
        for step in self.steps:
            x = step(x, arrays)
        return x


def check(seed: int, name: str, place: SingleDeviceSharding) -> dict[str, Any]:
    """Compile one program and return its predicted seconds with its lower bounds."""
    program, slice = RandomProgram(seed), slice_named(name)
    arguments = [jax.ShapeDtypeStruct(shape, program.dtype, sharding=place) for shape in program.shapes]
    lowered = jax.jit(program.run).lower(*arguments)
    out = lowered.out_info
    module = parse(lowered.compile().as_text() or "")
    roof = PeakRates.of(slice.chip)
    moved = sum(x.size * x.dtype.itemsize for x in (*arguments, out))
    bounds = {
        "flops_seconds": program.flops / roof.flops,
        "bytes_seconds": moved / roof.hbm_bytes_per_second,
        "roofline_seconds": time_floor(module, roof).seconds,
    }
    seconds = simulation_of(module, slice).run().seconds
    return {"seed": seed, "slice": name, "seconds": seconds, **bounds, "holds": seconds >= max(bounds.values())}


def main(count: int) -> int:
    rows = []
    places = {
        name: SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])
        for name, topology in SLICES.items()
    }
    started = time.monotonic()
    for seed in range(count):
        name = list(SLICES)[seed % len(SLICES)]
        rows.append(check(seed, name, places[name]))
        if not rows[-1]["holds"]:
            print(rows[-1], flush=True)
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    below = sum(not row["holds"] for row in rows)
    print(f"{count} programs in {time.monotonic() - started:.0f} s, {below} below a lower bound")
    return below > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
