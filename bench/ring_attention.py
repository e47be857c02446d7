"""Compare ring attention with gathered keys and values: one layer of llama3.1-8b, forward and backward pass.

    python bench/ring_attention.py            # all rows, minutes each; needs libtpu, no TPU
    python bench/ring_attention.py v6e-16     # only this slice; the other rows stay
    python bench/ring_attention.py --check    # only compare the values of both on four virtual CPU devices
    python bench/ring_attention.py --table    # only write the table of docs/how-to/long-context.md again

Both get queries, keys and values that are split over the context axis in zigzag order, as in `forerun.nn.context`.
`gathered` is forerun's own attention. `ring` sends the keys and values of each device around the axis. A device has an
early and a late chunk of queries, and computes two products of chunks in each step, which it merges by their
log-sum-exp. The next keys are on their way meanwhile. Gradients of keys and values travel with them.

The time is the one that `forerun plan` would predict for the program, without a TPU. Writes
bench/results/ring_attention.json after each row.

Letters: C devices of the ring, B batch, T positions on one device, N positions of a chunk, H query heads, K kv heads, G
query heads per kv head, D head.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ring_kernels import UNMASKED, ring_local

from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.nn.attention import RESIDUAL, Kernel, split_over_devices
from forerun.nn.context import SequenceSplit, split_attention
from forerun.nn.sharding import CONTEXT
from forerun.planner.compile.compiler import DUMP_FLAGS
from forerun.planner.compile.dump import SCHEDULED, copy_dump
from forerun.planner.compile.installed_compilers import compile_only_topology
from forerun.planner.hlo import Computation, Instruction, Module, parse
from forerun.planner.memory import Unreadable, memory_report, newest
from forerun.planner.time import simulation, splash_cost
from forerun.planner.time.prediction import step_time
from forerun.program.build import make_mesh
from forerun.program.compiler_options import compile_lowered, compiler_options
from forerun.program.kernels import attention
from forerun.units import GIB

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "ring_attention.json"
PAGE = HERE.parent / "docs" / "how-to" / "long-context.md"
START, END = "<!-- ring attention: start -->\n", "<!-- ring attention: end -->\n"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# The meshes of bench/results/long_context.json.
ROWS = (
    ("v6e-16", 131_072, MeshShape(1, 1, 1, context=16)),
    ("v5p-32", 131_072, MeshShape(1, 1, 1, context=16)),
    ("v5p-256", 1_048_576, MeshShape(1, 1, 4, context=32)),
)


class FullShape(splash_cost.KernelShape):
    """A kernel without a mask. The planner expects causal ones, which compute about half of the blocks."""

    @property
    def computed(self) -> float:
        return float(self.rows * self.columns)


def shape_of(computation: Computation, x: Instruction) -> splash_cost.KernelShape | None:
    """Return the shape of a splash kernel, with all blocks for a product of chunks without a mask."""
    found = splash_cost.kernel_shape(computation, x)
    if found is None or UNMASKED not in x.op_name():
        return found
    return FullShape(**asdict(found))


simulation.kernel_shape = shape_of  # type: ignore[attr-defined]


def layer(kind: str, kernel: Kernel, devices: int, arrays: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
    """Return the attention [1, S, H, D] by `kind`, on the ambient mesh."""
    q, k, v = arrays
    if kind == "gathered":
        return split_attention(q, k, v, ids, window=None, kernel=kernel, split=SequenceSplit(devices))
    return split_over_devices(partial(ring_local, kernel=kernel, devices=devices), q, k, v, ids, CONTEXT)


def both_passes(kind: str, kernel: Kernel, devices: int, arrays: Any, ids: jax.Array, pull: jax.Array) -> Any:
    """Return the output and the gradients, with only the attention's output kept between the passes."""
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    run = jax.checkpoint(lambda arrays: layer(kind, kernel, devices, arrays, ids), policy=policy)
    out, back = jax.vjp(run, arrays)
    return out, back(pull)


def check() -> float:
    """Return the largest relative difference of outputs and gradients on four virtual CPU devices."""
    mesh = make_mesh(MeshShape(1, 1, 1, context=4), jax.devices())
    length, kernel = 1024, Kernel("splash", 128, fused_backward=True)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, heads, 128) for heads in (4, 2, 2, 4)]
    *arrays, pull = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    ids = jnp.asarray(np.searchsorted([300, 700], np.arange(length), "right")[None] + 1, jnp.int32)
    worst = 0.0
    with jax.set_mesh(mesh):
        spread = SequenceSplit(4).spread
        given = tuple(spread(x) for x in arrays), spread(ids), spread(pull)
        for fused in (True, False):
            own = Kernel("splash", kernel.block, fused_backward=fused)
            wanted = jax.jit(partial(both_passes, "gathered", Kernel("xla"), 4))(*given)
            found = jax.jit(partial(both_passes, "ring", own, 4))(*given)
            for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                worst = max(worst, float(jnp.abs(have - want).max() / jnp.abs(want).max()))
    return worst


def compile_layer(kind: str, on: str) -> None:
    """Compile one layer. The parent ends this process as soon as the compiler has dumped the scheduled program."""
    [(length, shape)] = [(length, shape) for name, length, shape in ROWS if name == on]
    devices = compile_only_topology(slice_named(on)).devices
    first = devices[0]
    chunk = length // shape.context // 2
    kernel = attention("auto", first.platform, first.device_kind, "bfloat16", chunk=chunk).kernel
    mesh = make_mesh(shape, devices)

    def array(*dims: int, dtype: Any = jnp.bfloat16) -> Any:
        heads = "tp" if shape.tp > 1 else None
        spec = PartitionSpec(None, CONTEXT, heads, None) if len(dims) == 2 else PartitionSpec(None, CONTEXT)
        return jax.ShapeDtypeStruct((1, length, *dims), dtype, sharding=NamedSharding(mesh, spec))

    def step(*given: Any) -> Any:
        return both_passes(kind, kernel, shape.context, *given)

    q, k = array(HEADS, HEAD_DIM), array(KV_HEADS, HEAD_DIM)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower((q, k, k), array(dtype=jnp.int32), q)
        compile_lowered(lowered, compiler_options(first.platform, first.device_kind, shape).values)


def kernels(module: Module) -> set[str]:
    """Return the shapes of the attention kernels, with the blocks that each computes."""
    shapes = (shape_of(one, x) for one in module.computations.values() for x in one.instructions)
    return {f"{shape} computes {shape.computed}" for shape in shapes if shape is not None}


def planned(kind: str, on: str, length: int, shape: MeshShape) -> dict[str, Any]:
    """Return memory and predicted time of one layer."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        flags = {"XLA_FLAGS": DUMP_FLAGS.format(folder=name)}
        child = subprocess.Popen([sys.executable, __file__, "--compile", kind, on], env=os.environ | flags)
        try:
            while True:
                ended = child.poll() is not None
                try:
                    files = copy_dump(Path(name), child.pid, ended)
                    break
                except (Unreadable, FileNotFoundError):
                    if ended:
                        raise
                    time.sleep(0.5)
        finally:
            child.kill()
            child.wait()
        module = parse(newest(files, SCHEDULED))
        print(sorted(kernels(module)), file=sys.stderr)
        memory = memory_report(files, ["batch"] * 5)
    found = step_time(module, slice_named(on))
    return {
        "kind": kind,
        "slice": on,
        "mesh": str(shape),
        "length": length,
        "milliseconds": found.mid_seconds * 1e3,
        "parts_milliseconds": {name: seconds * 1e3 for name, seconds in found.parts_seconds.items()},
        "peak_bytes": int(memory.peak_bytes),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| slice | mesh | tokens | keys and values | time of a layer | attention | exposed | rest | peak GiB |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        parts = row["parts_milliseconds"]
        figures = [parts.get(name, 0.0) for name in ("attention", "collectives not hidden")]
        rest = row["milliseconds"] - sum(figures)
        lines.append(
            f"| {row['slice']} | {row['mesh']} | {row['length']:,} | {row['kind']} | {row['milliseconds']:.1f} ms "
            f"| {figures[0]:.1f} ms | {figures[1]:.1f} ms | {rest:.1f} ms | {row['peak_bytes'] / GIB:.2f} |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    if words[:1] == ["--compile"]:
        compile_layer(*words[1:])
        return 0
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    if not words or "--check" in words:
        known["largest_difference"] = check()
        print("largest relative difference to gathered attention:", known["largest_difference"], flush=True)
        if known["largest_difference"] > 1e-4:
            return 1
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    for on, length, shape in ROWS if not {"--table", "--check"} & set(words) else ():
        for kind in ("gathered", "ring"):
            if set(words) <= {on, kind}:
                known["rows"][f"{on} {kind}"] = row = planned(kind, on, length, shape)
                print(row, flush=True)
                known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
                RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    order = [f"{on} {kind}" for on, _, _ in ROWS for kind in ("gathered", "ring")]
    made = table([known["rows"][key] for key in order if key in known["rows"]])
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, mark, after = rest.partition(END)
    if mark:
        PAGE.write_text(f"{before}{START}\n{made}\n\n{END}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
