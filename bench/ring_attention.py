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
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding, PartitionSpec

from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.nn.attention import RESIDUAL, Kernel, split_over_devices
from forerun.nn.context import SequenceSplit, split_attention
from forerun.nn.sharding import CONTEXT
from forerun.nn.split_splash import FUSED_BYTES
from forerun.planner.compile.compiler import DUMP_FLAGS
from forerun.planner.compile.dump import SCHEDULED, copy_dump
from forerun.planner.compile.installed_compilers import compile_only_topology
from forerun.planner.hlo import Computation, Instruction, Module, parse
from forerun.planner.memory.memory_report import Unreadable, memory_report, newest
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
UNMASKED = "unmasked_chunks"  # in the names of the kernels without a mask
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


@dataclass(frozen=True)
class ChunkProduct:
    """Attention of a chunk of queries to a chunk of keys, for all heads: the forward and the backward kernels."""

    length: int
    group: int
    block: int
    fused: bool
    causal: bool
    interpret: bool

    def kernel(self) -> Any:
        block = math.gcd(self.length, self.block)
        mask = (masks.CausalMask if self.causal else masks.FullMask)((self.length, self.length))
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=None if self.fused else block,
            block_kv_dq=None if self.fused else block,
            use_fused_bwd_kernel=self.fused,
        )
        return splash.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * self.group),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def _named(self) -> Any:
        return nullcontext() if self.causal else jax.named_scope(UNMASKED)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Return the output [K, G, N, D] and the log-sum-exp [K, G, N]."""
        made = self.kernel()

        def of_head(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, (logsumexp,) = splash._splash_attention_forward(
                made.fwd_mask_info,
                q,
                k,
                v,
                ids,
                None,
                mask_value=splash.DEFAULT_MASK_VALUE,
                is_mqa=False,
                block_sizes=made.kwargs["block_sizes"],
                residual_checkpoint_name=None,
                save_residuals=True,
                mask_function=made.kwargs["mask_function"],
                interpret=self.interpret,
            )
            return out, logsumexp

        with self._named():
            out, logsumexp = jax.vmap(of_head)(q, k, v)
        return out, logsumexp

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, logsumexp: jax.Array, do: jax.Array, di: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of queries, keys and values. `logsumexp` is that of all keys of the sequence."""
        made = self.kernel()
        sizes = made.kwargs["block_sizes"]
        shared = {
            "is_mqa": False,
            "mask_value": splash.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": None,
            "q_layout": sizes.q_layout,
            "k_layout": sizes.k_layout,
            "v_layout": sizes.v_layout,
            "mask_function": made.kwargs["mask_function"],
            "interpret": self.interpret,
        }

        def of_head(*arrays: jax.Array) -> Any:
            q, k, v, logsumexp, do, di = arrays
            given = q, k, v, ids, None, logsumexp, do, di
            dq, dk, dv = splash._splash_attention_bwd_dkv(
                *given,
                bq=sizes.block_q_dkv,
                bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=made.dkv_mask_info,
                use_fused_bwd_kernel=self.fused,
                **shared,
            )
            if not self.fused:
                dq = splash._splash_attention_bwd_dq(
                    *given, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=made.dq_mask_info, **shared
                )
            return dq, dk, dv

        with self._named():
            dq, dk, dv = jax.vmap(of_head)(q, k, v, logsumexp, do, di)
        return dq, dk, dv


@dataclass(frozen=True)
class Ring:
    """Attention with keys and values that travel around the context axis. Batch size 1.

    Arrays have a dimension of the two chunks of a device in front: [2, K, G, N, D], and G = 1 for keys and values.
    """

    devices: int
    full: ChunkProduct
    causal: ChunkProduct

    def forward(self, q: Any, k: Any, v: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
        arrived = self._passed((k, v, ids))
        early = _parted(self.causal.forward(q[0], k[0], v[0], splash.SegmentIds(ids[0], ids[0])))
        late = _parted(self.causal.forward(q[1], k[1], v[1], splash.SegmentIds(ids[1], ids[1])))
        late = _merged(late, self.full.forward(q[1], k[0], v[0], splash.SegmentIds(ids[1], ids[0])))
        out, total = (jnp.stack(pair) for pair in zip(early, late, strict=True))

        def step(carry: Any, number: jax.Array) -> Any:
            (k, v, kv_ids), out, total = carry
            following = self._passed((k, v, kv_ids))
            found = self.full.forward(q[1], k[0], v[0], splash.SegmentIds(ids[1], kv_ids[0]))
            late = _merged((out[1], total[1]), found)
            out, total = out.at[1].set(late[0]), total.at[1].set(late[1])
            own = self._chunk(number)
            mine = splash.SegmentIds(_at(ids, own), _at(kv_ids, own))
            found = self.full.forward(_at(q, own), _at(k, own), _at(v, own), mine)
            merged = _merged((_at(out, own), _at(total, own)), found)
            return (following, _put(out, own, merged[0]), _put(total, own, merged[1])), None

        (_, out, total), _ = jax.lax.scan(step, (arrived, out, total), jnp.arange(1, self.devices))
        return out.astype(q.dtype), total

    def backward(self, kept: Any, do: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        q, k, v, ids, out, total = kept
        di = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
        arrived = self._passed((k, v, ids))

        def product(kernel: ChunkProduct, k: Any, v: Any, kv_ids: Any, mine: Any, theirs: Any) -> Any:
            segments = splash.SegmentIds(_at(ids, mine), _at(kv_ids, theirs))
            found = kernel.backward(
                _at(q, mine), _at(k, theirs), _at(v, theirs), segments, _at(total, mine), _at(do, mine), _at(di, mine)
            )
            return tuple(one.astype(jnp.float32) for one in found)

        def added(sums: Any, found: Any, mine: Any, theirs: Any) -> Any:
            dq, dk, dv = sums
            return dq.at[mine].add(found[0]), dk.at[theirs].add(found[1]), dv.at[theirs].add(found[2])

        sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for kernel, mine, theirs in ((self.causal, 0, 0), (self.causal, 1, 1), (self.full, 1, 0)):
            sums = added(sums, product(kernel, k, v, ids, mine, theirs), mine, theirs)

        def step(carry: Any, number: jax.Array) -> Any:
            here, (dq, dk, dv) = carry
            following, (dk, dv) = self._passed(here), self._passed((dk, dv))
            late = product(self.full, *here, 1, 0)
            own = self._chunk(number)
            other = product(self.full, *here, own, own)
            sums = added(added((dq, dk, dv), late, 1, 0), other, own, own)
            return (following, sums), None

        (_, (dq, dk, dv)), _ = jax.lax.scan(step, (arrived, sums), jnp.arange(1, self.devices))
        dk, dv = self._passed((dk, dv))
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    def _chunk(self, number: jax.Array) -> jax.Array:
        """Return the chunk whose queries see the keys' chunk of the same kind, from the device `number` before."""
        return jnp.where(jax.lax.axis_index(CONTEXT) >= number, 0, 1)

    def _passed(self, arrays: Any) -> Any:
        route = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, route), arrays)


def _at(x: jax.Array, index: Any) -> jax.Array:
    return x[index] if isinstance(index, int) else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)


def _parted(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return found[0].astype(jnp.float32), found[1]


def _merged(sums: tuple[jax.Array, jax.Array], found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the attention to two sets of keys from the outputs and log-sum-exps of both."""
    total = jnp.logaddexp(sums[1], found[1])
    old, new = (jnp.exp(part - total)[..., None] for part in (sums[1], found[1]))
    return sums[0] * old + found[0].astype(jnp.float32) * new, total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return ring.forward(q, k, v, ids)[0]


def _ring_forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
    # As for splash, a remat policy can keep the outputs. Then the backward pass does not run the forward pass again.
    out, total = (checkpoint_name(x, RESIDUAL) for x in ring.forward(q, k, v, ids))
    return out, (q, k, v, ids, out, total)


ring_attention.defvjp(_ring_forward, Ring.backward)


def ring_local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *, kernel: Kernel, devices: int) -> jax.Array:
    """Return the attention of the queries on one device, [1, T, H, D]."""
    _, T, H, D = q.shape
    K = k.shape[2]

    def chunks(x: jax.Array) -> jax.Array:
        """Return [1, T, K x G, D] as [2, K, G, N, D]."""
        return x.reshape(2, T // 2, K, -1, D).transpose(0, 2, 3, 1, 4)

    block = math.gcd(T // 2, kernel.block)
    fused = kernel.fused_backward and T // 2 // block * q.nbytes // 2 <= FUSED_BYTES
    fused = fused and (kernel.fused_length is None or kernel.fused_length >= T // 2)
    product = partial(
        ChunkProduct, T // 2, H // K, block, fused, interpret=jax.default_backend() == "cpu" and T <= 1024
    )
    ring = Ring(devices, product(causal=False), product(causal=True))
    scaled = chunks(q * D**-0.5)
    out = ring_attention(ring, scaled, chunks(k), chunks(v), ids.reshape(2, T // 2))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def layer(kind: str, kernel: Kernel, devices: int, arrays: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
    """Return the attention [1, S, H, D] by `kind`, on the ambient mesh."""
    if kind == "gathered":
        return split_attention(*arrays, ids, window=None, kernel=kernel, split=SequenceSplit(devices))
    return split_over_devices(partial(ring_local, kernel=kernel, devices=devices), *arrays, ids, CONTEXT)


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
