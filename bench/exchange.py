"""Cost of reading and writing a 4 GB checkpoint: host memory beyond the arrays, and speed compared with safetensors.

    python bench/exchange.py                 # about 4 minutes on two cores; needs 8 GB of disk and 16 GB of memory

A checkpoint of Llama's shape with random bfloat16 weights is written in shards, one tensor at a time. Each measurement
is a separate process with 8 virtual CPU devices, mesh 1x8x1.

Memory is the peak resident set (VmHWM) of the process, minus its resident set before, minus the bytes of the resulting
arrays. The resident set before (VmRSS) is read after a tiny program has run on the devices; then VmHWM is reset. Pages
of mapped files count while they are mapped. For writing, the arrays exist before the reset, so their bytes are not
subtracted.

Speed compares the seconds of `read_params` (including opening and checking the files) with `safe_open` and `get_tensor`
of every tensor, into numpy. Both are measured alternately in one process, with the files in the page cache. `kept`
keeps all tensors, as an import must; `dropped` frees each before the next. A ratio compares two medians. CPU seconds
are recorded as well, because they depend less on other load.

Writes bench/results/exchange.json, and exits with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 28, 2048, 16, 16, 128, 8192, 32_000
SHARD_BYTES = 10**9
ROUNDS = 3
MAX_MEMORY_BYTES = 600 * 10**6
LEAST_SPEED = 0.8
DEVICES = 8


def model() -> Any:
    from forerun.models.decoder import Decoder
    from forerun.models.decoder_config import DecoderConfig

    return Decoder(DecoderConfig(LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, tied=False))


def make(folder: Path) -> None:
    """Write the checkpoint with at most one tensor in memory."""
    import ml_dtypes
    import numpy as np

    from forerun.models.families import llama
    from forerun.models.keys import entries
    from forerun.weights_io.shards import Planned, Shards, shards_of

    random = np.random.default_rng(0)
    found = entries(llama.LLAMA_TABLE, model().specs(), model().stacks)
    planned = [Planned(entry.name, "BF16", entry.shape) for entry in found]
    with Shards(folder, shards_of(planned, SHARD_BYTES)) as shards:
        shards.write(lambda one: random.standard_normal(one.shape, np.float32).astype(ml_dtypes.bfloat16))
        shards.finish()


def wanted(dtype: str) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from forerun.nn import spec
    from forerun.nn.sharding import stored

    mesh = Mesh(np.array(jax.devices()).reshape(1, DEVICES, 1), ("data", "fsdp", "tp"))

    def placed(s: Any) -> Any:
        return jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=stored(mesh, s.shape, s.axes))

    return spec.map_specs(placed, model().specs())


def imported(folder: Path, dtype: str) -> Any:
    import jax

    from forerun.hub.safetensors import open_weights
    from forerun.models.families import llama
    from forerun.weights_io.read import read_params

    with open_weights(folder) as weights:
        return jax.block_until_ready(read_params(weights, llama.LLAMA_TABLE, model(), wanted(dtype)))


def memory(folder: Path, dtype: str) -> dict[str, int]:
    """Return the peak memory of one import and of the export after it, beyond the arrays."""
    import jax
    import jax.numpy as jnp

    from forerun.models.families import llama
    from forerun.weights_io.write import write_params

    for device in jax.devices():
        jax.device_put(jnp.ones((256, 256)), device).sum().block_until_ready()
    before = reset_peak()
    params = imported(folder, dtype)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    beyond = status("VmHWM") - before - arrays
    before = reset_peak()
    began = time.perf_counter()
    target = folder.parent / "written"
    write_params(target, params, llama.LLAMA_TABLE, model(), "BF16", SHARD_BYTES)
    seconds = time.perf_counter() - began
    peak = status("VmHWM") - before
    same = all(same_file(path, target / path.name) for path in sorted(folder.iterdir()))
    shutil.rmtree(target)
    return {
        "import_beyond_arrays_bytes": beyond,
        "arrays_bytes": arrays,
        "export_beyond_arrays_bytes": peak,
        "export_seconds": seconds,
        "written_files_equal": same,
    }


def speed(folder: Path, dtype: str) -> dict[str, Any]:
    import ml_dtypes  # noqa: F401  safetensors takes bfloat16 from it
    from safetensors import safe_open

    def alone(keep: bool) -> None:
        kept = []
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    if keep:
                        kept.append(tensor)

    ways: dict[str, Callable[[], Any]] = {
        "import": lambda: imported(folder, dtype),
        "kept": lambda: alone(True),
        "dropped": lambda: alone(False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    alone(False)  # read the files into the page cache
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            result = way()
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)
            del result
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "cpu_seconds": {name: [round(value, 3) for value in values] for name, values in cpu_seconds.items()},
        "ratio_to_kept": medians["kept"] / medians["import"],
        "ratio_to_dropped": medians["dropped"] / medians["import"],
    }


def reset_peak() -> int:
    """Reset VmHWM to the current resident set, and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def same_file(one: Path, other: Path) -> bool:
    with open(one, "rb") as first, open(other, "rb") as second:
        while True:
            a, b = first.read(1 << 24), second.read(1 << 24)
            if a != b:
                return False
            if not a:
                return True


def in_a_process(part: str, folder: Path, dtype: str) -> dict[str, Any]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    ran = subprocess.run(
        [sys.executable, __file__, "--part", part, "--folder", str(folder), "--dtype", dtype],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["make", "memory", "speed"])
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; an existing one is used")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if given.part == "make":
        make(given.folder)
        print("{}")
        return
    if given.part:
        print(json.dumps({"memory": memory, "speed": speed}[given.part](given.folder, given.dtype)))
        return

    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name) / "checkpoint"
        if not folder.exists():
            in_a_process("make", folder, "bfloat16")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        result: dict[str, Any] = {"checkpoint_bytes": size, "devices": DEVICES, "cores": os.cpu_count()}
        for dtype in ("bfloat16", "float32"):
            result[dtype] = in_a_process("memory", folder, dtype) | in_a_process("speed", folder, dtype)
            result[dtype]["load_average"] = os.getloadavg()[0]
            print(dtype, json.dumps(result[dtype], indent=2), flush=True)
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results/exchange.json").write_text(json.dumps(result, indent=2) + "\n")
    parts = [result["bfloat16"], result["float32"]]
    met = [
        all(part["import_beyond_arrays_bytes"] <= MAX_MEMORY_BYTES for part in parts),
        all(part["export_beyond_arrays_bytes"] <= MAX_MEMORY_BYTES for part in parts),
        all(part["written_files_equal"] for part in parts),
        result["bfloat16"]["ratio_to_kept"] >= LEAST_SPEED,
    ]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
