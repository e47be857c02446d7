"""Count the cycles of splash attention kernels in the compiler's final VLIW code.

python bench/kernel_cycles.py                  # all shapes that are not recorded yet; a minute or more for each
python bench/kernel_cycles.py v5e v5p          # only these chips

Compiles the forward and the backward kernels of `nn/attention.py` alone, with the libtpu package and without a TPU, and
lets the compiler dump the bundles of each kernel. One bundle takes one cycle. Writes bench/results/kernel_cycles.json,
from which the table of src/forerun/planner/time/splash_cost.py is copied.

A kernel is a loop over blocks of queries and keys. Its parts are regions of the dumped code:
- main: the region with nearly all matrix multiplications, run for blocks that the causal mask does not exclude;
- row: regions that begin and end a row of blocks;
- visit: the rest of the loop, run for each block.
The loop's limit shows how the cores of a device share the kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "kernel_cycles.json"
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# Kernel blocks as `program/kernels.py` chooses them: the longest block, and shorter ones for short sequences.
SHAPES = [
    *((chip, 128, 512, batch) for chip, batch in (("v5p", 1), ("v5p", 3), ("v4", 1), ("v4", 7))),
    *((chip, head, 512, 2) for chip in ("v5e", "v5p", "v4") for head in (128, 64, 256)),
    *(("v6e", head, block, 2) for block in (1024, 2048) for head in (128, 64, 256)),
    *(("tpu7x", head, 512, 2) for head in (128, 64, 256)),
    *((chip, 128, block, 2) for chip in ("v5e", "v5p", "v6e") for block in (256, 128)),
    ("v6e", 128, 512, 2),
]
# Shapes whose backward pass is one kernel. Those of v6e are always so.
FUSED = [
    *(("v5e", head, 512, 2) for head in (128, 64)),
    ("v5p", 128, 512, 2),
    ("v4", 128, 512, 2),
    ("tpu7x", 128, 512, 2),
]
HEADS = 4
KINDS = {"fwd": "forward", "dq": "dq", "dkv": "dkv"}
BRANCH_SLOTS = 4  # bundles between a branch and its effect


@dataclass(frozen=True)
class KernelCycles:
    """Counted bundles of one kernel, for one block of queries and keys on one core."""

    chip: str
    head: int
    block: int
    batch: int
    kind: str
    share: float  # share of the blocks that the busiest core of the device visits
    main: int
    row: int
    visit: int
    matmuls: dict[str, int]  # instructions for the matrix unit in `main`, by name


def bundles(text: str) -> list[str]:
    """Return the text of each bundle."""
    found: list[str] = []
    for line in text.splitlines():
        if re.match(r"^\s*(0x[0-9a-f]+|0)\s+(?:LH|LB|LE|PB|PF|CT)?\s*:", line):
            found.append(line)
        elif found:
            found[-1] += "\n" + line
    return found


def counted(text: str, grid: int) -> tuple[float, int, int, int, dict[str, int]]:
    """Return (share of the busiest core, main, row, visit, matrix instructions of main) of one kernel's code."""
    code = bundles(text)
    first = next(i for i, bundle in enumerate(code) if re.match(r"^\s*0x[0-9a-f]+\s+LB", bundle))
    test = max(i for i, bundle in enumerate(code) if "loop exit test" in bundle)
    last = next(i for i in range(test, len(code)) if "sbr.rel" in code[i]) + BRANCH_SLOTS
    limit = re.search(r"totalorder %\S+, (\d+)\s*/\* loop exit test", code[test])
    trips = int(limit[1]) - 2 if limit else grid  # the loop has two more iterations for its pipeline of copies
    starts = {
        int(number): i
        for i, bundle in enumerate(code)
        for number in re.findall(r"Start(?:/End empty)? region (\d+)", bundle)
    }
    regions = []
    for i in range(first, last):
        found = re.search(r"sbr\.rel[^$]*target = \$region(\d+)", code[i])
        end = starts.get(int(found[1])) if found else None
        if end is not None and i < end <= last:
            regions.append((i + BRANCH_SLOTS, end))
    matmuls = [i for i in range(first, last) if "vmatmul" in code[i]]
    main = min(
        (r for r in regions if sum(r[0] - BRANCH_SLOTS <= i < r[1] for i in matmuls) >= 0.9 * len(matmuls)),
        key=lambda r: r[1] - r[0],
    )
    rows = [r for r in regions if r[1] <= main[0] or r[0] >= main[1]]  # beside the main region, not around it
    row = sum(end - start for start, end in rows)
    size = main[1] - main[0]
    names = re.findall(r"(?:= |\s)(vmatmul[\w.]*?)(?:\.gmra)?(?:\.mxu\d)?\s", "\n".join(code[main[0] : main[1]]))
    tally = {name: names.count(name) for name in sorted(set(names))}
    return round(trips / grid, 3), size, row, last + 1 - first - size - row, tally


def measure(chip: str, head: int, block: int, batch: int, fused: bool) -> list[KernelCycles]:
    """Compile the kernels of one shape in a child process and count their cycles."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        environment = {**os.environ, "LIBTPU_INIT_ARGS": flags, "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
        environment |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        asked = [sys.executable, __file__, "--compile", chip, str(head), str(block), str(batch), str(int(fused))]
        subprocess.run(asked, env=environment, check=True, capture_output=True)
        found = []
        for path in sorted(Path(folder).glob("*splash_m*-final_bundles.txt")):
            name = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", path.name)
            if name is None or "schedule-analysis" in path.name:
                continue
            kind = "backward" if fused and name[1] == "dkv" else KINDS[name[1]]
            share, main, row, visit, matmuls = counted(path.read_text(errors="replace"), batch * HEADS * 4)
            found.append(KernelCycles(chip, head, block, batch, kind, share, main, row, visit, matmuls))
        return found


def compile_kernels(chip: str, head: int, block: int, batch: int, fused: int) -> None:
    """Compile attention and its gradients on one device, for sequences of two blocks."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from forerun.nn.attention import Kernel, Scores, _splash_local

    options = {"chip_config_name": "megacore"} if chip == "v4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip], **options).devices
    place = SingleDeviceSharding(devices[0])
    queries = jax.ShapeDtypeStruct((batch, 2 * block, HEADS, head), jnp.bfloat16, sharding=place)
    segments = jax.ShapeDtypeStruct((batch, 2 * block), jnp.int32, sharding=place)
    kernel = Kernel("splash", block=block, fused_backward=bool(fused))
    run = partial(_splash_local, scores=Scores(1.0, None, None), kernel=kernel)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, gradient: jax.Array) -> object:
        out, backward = jax.vjp(lambda q, k, v: run(q, k, v, ids), q, k, v)
        return out, backward(gradient)

    lowered = jax.jit(attention).lower(queries, queries, queries, segments, queries)
    lowered.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": "98304"} if chip == "v6e" else {})


def main(chips: list[str]) -> int:
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for shape in [*SHAPES, *FUSED]:
        fused = shape[0] == "v6e" or shape in FUSED
        kinds = {"backward"} if fused else {"dq", "dkv"}
        known = {row["kind"] for row in rows if (row["chip"], row["head"], row["block"], row["batch"]) == shape}
        if kinds <= known or (chips and shape[0] not in chips):
            continue
        found = [one for one in measure(*shape, fused) if one.kind not in known]
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows += [asdict(one) for one in found]
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        for one in found:
            print(one, flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_kernels(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        sys.exit(main(sys.argv[1:]))
